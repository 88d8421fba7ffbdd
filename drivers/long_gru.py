"""An explicit GRU over a sequence of 1,000 steps; what the ranks share is the time axis.

    mpirun -n 2 python drivers/long_gru.py

Layer i is step i of the sequence: u_{i+1} = u_i + h (1 - z(u_i, x_i)) (n(u_i, x_i) - u_i), a gated recurrent unit with
step h (Moon, Cyr, "Parallel training of GRU networks with a multi-grid solver for long sequences", ICLR 2022,
arXiv 2203.04738). The sequence is the side input, of which layer i reads x_i. All steps have the same weights: every
rank holds a copy per step and sums their gradients over all steps, so that the copies stay equal.
Task: tell noisy sine waves of three frequencies apart.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from mpi4py import MPI

import lpnet

WIDTH, BATCH, CLASSES = 12, 48, 3


class Gate(torch.nn.Module):
    """The residual function of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = torch.nn.Linear(2, 3 * WIDTH)
        self.states = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, u: torch.Tensor, side: torch.Tensor, layer: int) -> torch.Tensor:
        """(batch, width) to the same, with the input of this step."""
        reset, update, new = self.inputs(side[layer]).chunk(3, 1)
        r, z, n = self.states(u).chunk(3, 1)
        r, z = torch.sigmoid(reset + r), torch.sigmoid(update + z)
        return (1 - z) * (torch.tanh(new + r * n) - u)


class Opening(torch.nn.Module):
    """The first state: zeros for every sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Samples to states."""
        return x.new_zeros(len(x), WIDTH)


def waves(steps: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences (steps, batch, 2) of a noisy wave and its slope, and their classes; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(BATCH) % CLASSES
    phase = torch.rand(BATCH, generator=generator)
    angle = 2 * torch.pi * ((2.0 + 3.0 * y) * torch.linspace(0, 1, steps)[:, None] + phase)
    clean = torch.stack([torch.sin(angle), torch.cos(angle) * (2.0 + 3.0 * y) / 5.0], -1)
    return clean + 0.1 * torch.randn(clean.shape, generator=generator), y


def tie(net: lpnet.LayerParallel, comm: MPI.Comm, *, gradients: bool) -> None:
    """Gradients: their sum over all steps in every copy; else the first step's weights in every copy. Collective."""
    for p in net.stack.parameters():
        rows = p.grad if gradients else p.detach()
        part = rows.sum(0) if gradients else rows[0].clone()
        if gradients:
            comm.Allreduce(MPI.IN_PLACE, part.numpy(), op=MPI.SUM)
        else:
            comm.Bcast(part.numpy(), root=0)
        rows.copy_(part.expand_as(rows))


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    (sequence, y), (other, answers) = waves(options.length, 0), waves(options.length, 1)

    torch.manual_seed(0)
    stack = lpnet.LayerStack(Gate, num_layers=options.length, final_time=20.0, comm=comm, seed=0)
    mgrit = lpnet.MGRIT(levels=3, coarsening=[8, 4], forward_iterations=1, adjoint_iterations=1)
    net = lpnet.LayerParallel(stack, opening=Opening(), closing=torch.nn.Linear(WIDTH, CLASSES), mgrit=mgrit)
    tie(net, comm, gradients=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)

    began = time.perf_counter()
    for step in range(options.steps):
        x = sequence.new_zeros(BATCH)  # the samples; what they are comes by `side`
        loss = F.cross_entropy(net(x, batch=0, side=sequence), y)
        optimizer.zero_grad()
        loss.backward()
        tie(net, comm, gradients=True)
        optimizer.step()
        if step % 4 == 3 or step == 0:
            with torch.no_grad():
                hits = float((net(x, side=other).argmax(1) == answers).float().mean())
            if comm.rank == 0:
                seconds = time.perf_counter() - began
                print(f"step {step + 1:3d}  loss {loss.item():.3f}  validation {100 * hits:.1f} %  {seconds:.1f} s")


if __name__ == "__main__":
    main()
