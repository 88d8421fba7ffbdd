"""Starts of a solve, coarse operators and weights of C-relaxation, measured on a trained network.

    python drivers/warm_starts.py [STEPS]

A Peaks network of 32 layers is trained by exact gradients on batches of 100. Then every start meets a batch: `kept` has
its states of one step ago, `class_mean` means of other batches, `coarse` and `zero` nothing. Prints cosine and relative
error of the gradient; then the convergence factors of both solves, cosine, error and layer evaluations of both solves
for coarse operators and weights of C-relaxation, with three iterations from the coarsest grid.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from lpnet.config import MGRIT, Config, DataConfig, ModelConfig, OptimConfig
from lpnet.data.samples import Samples, load
from lpnet.mgrit.control import Check
from lpnet.mgrit.network import build_network
from lpnet.optim.rows import trainable
from lpnet.train.strategies import make_strategy


def gradient(net: Any, samples: Samples, **how: Any) -> torch.Tensor:
    """The gradient of the loss, flat."""
    shards = trainable(net.shards())
    for shard in shards:
        shard.tensor.grad = None
    F.cross_entropy(net.local_logits(samples.x, classes=samples.y, **how), samples.y).backward()
    return torch.cat([shard.tensor.grad.reshape(-1).double() for shard in shards])


def main() -> None:
    """Train, then print the two tables."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    config = Config(
        method="mgrit",
        model=ModelConfig(layers=32, width=8, activation="smooth_relu"),
        data=DataConfig(train_samples=500, validation_samples=50),
        mgrit=MGRIT(levels=1),
        optim=OptimConfig(lr=0.01),
    )
    data = load(config.data, 0, torch.float32)
    batches = [
        data.train.take(part) for part in torch.randperm(500, generator=torch.Generator().manual_seed(0)).split(100)
    ]
    serial = build_network(config, data)
    strategy = make_strategy(serial, config.optim)
    for step in range(steps):
        loss = strategy.step(batches[step % 5], None).loss

    def follow(net: Any) -> None:
        with torch.no_grad():
            for mine, other in zip(net.shards(), serial.shards(), strict=True):
                mine.tensor.copy_(other.tensor)

    def made(**settings: Any) -> Any:
        net = build_network(replace(config, mgrit=MGRIT(coarsening=4, check_every=0, **settings)), data)
        follow(net)
        return net

    print(f"loss {loss:.4f} after {steps} steps\n\n| start | iterations | cosine | error |\n|---|---|---|---|")
    starts = [(guess, k) for guess in ("kept", "class_mean", "coarse", "zero") for k in (1, 2, 4)]
    nets = {}
    for guess, k in starts:
        nets[guess, k] = made(initial_guess=guess, forward_iterations=k, adjoint_iterations=k)
        for batch in range(4) if guess == "class_mean" else [4]:
            gradient(nets[guess, k], batches[batch], batch=batch if guess == "kept" else None)
    strategy.step(batches[0], None)  # the parameters move on by one step
    exact = gradient(serial, batches[4])
    for (guess, k), net in nets.items():
        follow(net)
        found = gradient(net, batches[4], batch=4 if guess == "kept" else None)
        check = Check.of(float(found @ found), float(found @ exact), float(exact @ exact))
        print(f"| {guess} | {k} | {check.cosine:.4f} | {check.error:.2e} |")
    names = ["coarse", "relaxation", "C-weight", "rho forward", "rho adjoint", "cosine", "error", "evaluations"]
    relaxations = (("F", 1.0), ("FCF", 0.7), ("FCF", 1.0), ("FCF", 1.3))
    for levels in (2, 3):
        print(f"\n{levels} levels\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
        for coarse, (relaxation, weight) in itertools.product(("injected", "averaged", "half_steps"), relaxations):
            sweeps: dict[str, Any] = {"levels": levels, "coarse": coarse, "relaxation": relaxation, "c_weight": weight}
            net = made(**sweeps, initial_guess="coarse", forward_iterations=3, adjoint_iterations=3)
            found = gradient(net, batches[4])
            forward, adjoint = net.solve_reports(net.residual_squares())
            check = Check.of(float(found @ found), float(found @ exact), float(exact @ exact))
            rates = f"{forward.rho:.3f} | {adjoint.rho:.3f} | {check.cosine:.4f} | {check.error:.2e}"
            work = sum(forward.evaluations + adjoint.evaluations)
            print(f"| {coarse} | {relaxation} | {weight} | {rates} | {work} |")


if __name__ == "__main__":
    main()
