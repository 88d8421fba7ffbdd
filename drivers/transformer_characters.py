"""A pre-norm transformer encoder whose layers are shared by the ranks, on a small character task.

    mpirun -n 2 python drivers/transformer_characters.py

The text is made here: sentences of a small grammar. The network reads 24 characters and predicts each one's successor;
the causal mask is a side input, which every layer gets. Fixed mini-batches start from the states they had one epoch ago
(2 forward and 1 adjoint iterations); dropout draws one mask per layer and step for all multigrid evaluations.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import torch.nn.functional as F
from mpi4py import MPI

import lpnet

WIDTH, LENGTH, BATCH, BATCHES = 32, 24, 32, 4


class Encoder(torch.nn.Module):
    """The residual function of one layer: attention and perceptron, each after its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)])
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.perceptron = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Dropout(0.05),
            torch.nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, u: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        """(batch, characters, width) to the same, with the causal mask."""
        v = self.norms[0](u)
        attended = self.attention(v, v, v, attn_mask=side, need_weights=False)[0]
        return attended + self.perceptron(self.norms[1](u + attended))


class Opening(torch.nn.Module):
    """Characters and their places to states."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = torch.nn.Embedding(characters, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples to states."""
        return self.characters(x) + self.places.weight


def sentences(number: int) -> str:
    """Text of a small grammar, the same on every rank."""
    draw = random.Random(0)
    words = (["a cat", "the dog", "one bird"], ["sees", "hears", "likes"], ["the sea.", "a tree.", "the rain."])
    return " ".join(" ".join(draw.choice(choice) for choice in words) for _ in range(number))


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    text = sentences(300)
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(character) for character in text])
    starts = torch.randint(0, len(codes) - LENGTH - 1, (BATCHES + 1, BATCH), generator=torch.Generator().manual_seed(0))
    windows = codes[starts[..., None] + torch.arange(LENGTH + 1)]  # the last batch is for validation
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    torch.manual_seed(0)
    stack = lpnet.LayerStack(Encoder, num_layers=options.layers, final_time=4.0, comm=comm, seed=0)
    closing = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, len(alphabet)))
    mgrit = lpnet.MGRIT(levels=2, coarsening=4, forward_iterations=2, adjoint_iterations=1)
    net = lpnet.LayerParallel(stack, opening=Opening(len(alphabet)), closing=closing, mgrit=mgrit)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    began = time.perf_counter()
    for step in range(options.steps):
        batch = step % BATCHES
        x, y = windows[batch, :, :-1], windows[batch, :, 1:]
        net.begin_step(step)
        loss = F.cross_entropy(net(x, batch=batch, side=mask).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 12 == 11 or step == 0:
            net.eval()
            with torch.no_grad():
                logits = net(windows[-1, :, :-1], side=mask)
            net.train()
            hits = float((logits.argmax(-1) == windows[-1, :, 1:]).float().mean())
            if comm.rank == 0:
                seconds = time.perf_counter() - began
                print(f"step {step + 1:3d}  loss {loss.item():.3f}  validation {100 * hits:.1f} %  {seconds:.1f} s")


if __name__ == "__main__":
    main()
