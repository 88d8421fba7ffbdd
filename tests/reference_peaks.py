"""The Peaks training problem in plain numpy loops, against which lpnet is checked: imports nothing of lpnet.

Network, objective and optimiser of Günther, Ruthotto, Schroder, Cyr, Gauger, "Layer-parallel training of deep
residual neural networks", SIMODS 2(1), 2020: forward Euler, its adjoint layer by layer, Tikhonov and d theta/dt
regularisation, L-BFGS by the two-loop recursion (Nocedal and Wright, algorithms 7.4 and 7.5) with Armijo backtracking.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ETA = 0.1
KEYS = ("hidden_weight", "hidden_bias", "classifier_weight", "classifier_bias")
Parameters = dict[str, np.ndarray]


def smooth_relu(x: np.ndarray) -> np.ndarray:
    """x^2 / (4 eta) + x / 2 + eta / 4 for |x| < eta, max(x, 0) elsewhere."""
    return np.where(np.abs(x) < ETA, x * x / (4 * ETA) + x / 2 + ETA / 4, np.maximum(x, 0.0))


def smooth_relu_slope(x: np.ndarray) -> np.ndarray:
    """Derivative of `smooth_relu`."""
    return np.where(np.abs(x) < ETA, x / (2 * ETA) + 0.5, (x > 0).astype(float))


@dataclass
class Samples:
    """x: (samples, 2); y: (samples,) class numbers."""

    x: np.ndarray
    y: np.ndarray


def read_samples(root: Path, part: str) -> Samples:
    """features_PART.dat and labels_PART.dat (one-hot) of the original code."""
    return Samples(np.loadtxt(root / f"features_{part}.dat"), np.loadtxt(root / f"labels_{part}.dat").argmax(1))


def generate_samples(count: int, seed: int) -> Samples:
    """`count` random grid points of the peaks function, equally many of each of the five bands of its height."""
    axis = np.linspace(-3.0, 3.0, 256)
    x, y = np.meshgrid(axis, axis, indexing="ij")
    z = (
        3 * (1 - x) ** 2 * np.exp(-(x**2) - (y + 1) ** 2)
        - 10 * (x / 5 - x**3 - y**5) * np.exp(-(x**2) - y**2)
        - np.exp(-((x + 1) ** 2) - y**2) / 3
    )
    edges = np.linspace(z.min(), z.max(), 6)
    rng = np.random.default_rng(seed)
    points, labels = [], []
    for band in range(5):
        rows, columns = np.nonzero((z > edges[band]) & (z <= edges[band + 1]))
        for pick in rng.choice(len(rows), count // 5, replace=False):
            points.append((axis[rows[pick]], axis[columns[pick]]))
            labels.append(band)
    return Samples(np.array(points), np.array(labels))


def random_parameters(layers: int, width: int, classes: int, scale: float, seed: int) -> Parameters:
    """Uniform random parameters in [0, scale), one bias number per layer."""
    rng = np.random.default_rng(seed)
    shapes = {
        "hidden_weight": (layers, width, width),
        "hidden_bias": (layers,),
        "classifier_weight": (classes, width),
        "classifier_bias": (classes,),
    }
    return {key: scale * rng.random(shape) for key, shape in shapes.items()}


def flatten(parameters: Parameters) -> np.ndarray:
    """All parameters as one vector."""
    return np.concatenate([parameters[key].ravel() for key in KEYS])


def unflatten(vector: np.ndarray, like: Parameters) -> Parameters:
    """The inverse of `flatten`."""
    out, start = {}, 0
    for key in KEYS:
        out[key] = vector[start : start + like[key].size].reshape(like[key].shape).copy()
        start += like[key].size
    return out


@dataclass
class PeaksProblem:
    """The objective of one set of samples; `ddt` and the Tikhonov terms as in the paper."""

    train: Samples
    final_time: float
    tikhonov: float = 0.0
    classifier_tikhonov: float = 0.0
    ddt: float = 0.0

    def propagate(self, parameters: Parameters, x: np.ndarray) -> list[np.ndarray]:
        """States u_0 .. u_N, each (samples, width)."""
        weights, biases = parameters["hidden_weight"], parameters["hidden_bias"]
        h = self.final_time / len(weights)
        states = [np.pad(x, ((0, 0), (0, weights.shape[2] - x.shape[1])))]
        for i in range(len(weights)):
            states.append(states[i] + h * smooth_relu(states[i] @ weights[i].T + biases[i]))
        return states

    def logits(self, parameters: Parameters, x: np.ndarray) -> np.ndarray:
        """(samples, classes)."""
        return self.propagate(parameters, x)[-1] @ parameters["classifier_weight"].T + parameters["classifier_bias"]

    def accuracy(self, parameters: Parameters, samples: Samples) -> float:
        """Per cent."""
        return 100.0 * float(np.mean(self.logits(parameters, samples.x).argmax(1) == samples.y))

    def regularization(self, parameters: Parameters) -> float:
        """Tikhonov and d theta/dt terms."""
        weights, biases = parameters["hidden_weight"], parameters["hidden_bias"]
        h = self.final_time / len(weights)
        value = 0.5 * self.tikhonov * (np.sum(weights**2) + np.sum(biases**2))
        value += (
            0.5
            * self.classifier_tikhonov
            * (np.sum(parameters["classifier_weight"] ** 2) + np.sum(parameters["classifier_bias"] ** 2))
        )
        for i in range(1, len(weights)):
            value += (
                0.5
                * self.ddt
                * (np.sum(((weights[i] - weights[i - 1]) / h) ** 2) + ((biases[i] - biases[i - 1]) / h) ** 2)
            )
        return float(value)

    def objective(self, parameters: Parameters) -> tuple[float, float]:
        """Objective and its cross-entropy part."""
        logits = self.logits(parameters, self.train.x)
        shifted = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(shifted)), self.train.y]
        loss = float(losses.mean())
        return loss + self.regularization(parameters), loss

    def gradient(self, parameters: Parameters) -> Parameters:
        """Gradient of the objective by the adjoint recursion."""
        weights, biases = parameters["hidden_weight"], parameters["hidden_bias"]
        layers, samples = len(weights), len(self.train.y)
        h = self.final_time / layers
        states = self.propagate(parameters, self.train.x)
        logits = states[-1] @ parameters["classifier_weight"].T + parameters["classifier_bias"]
        softmax = np.exp(logits - logits.max(1, keepdims=True))
        softmax /= softmax.sum(1, keepdims=True)
        softmax[np.arange(samples), self.train.y] -= 1.0
        softmax /= samples
        gradient = {key: np.zeros_like(parameters[key]) for key in KEYS}
        gradient["classifier_weight"] = (
            softmax.T @ states[-1] + self.classifier_tikhonov * parameters["classifier_weight"]
        )
        gradient["classifier_bias"] = softmax.sum(0) + self.classifier_tikhonov * parameters["classifier_bias"]
        adjoint = softmax @ parameters["classifier_weight"]
        for i in reversed(range(layers)):
            inner = h * adjoint * smooth_relu_slope(states[i] @ weights[i].T + biases[i])
            gradient["hidden_weight"][i] = inner.T @ states[i] + self.tikhonov * weights[i]
            gradient["hidden_bias"][i] = inner.sum() + self.tikhonov * biases[i]
            adjoint = adjoint + inner @ weights[i]
        for i in range(1, layers):
            for key in ("hidden_weight", "hidden_bias"):
                slope = self.ddt * (parameters[key][i] - parameters[key][i - 1]) / h**2
                gradient[key][i] += slope
                gradient[key][i - 1] -= slope
        return gradient


@dataclass
class LBFGS:
    """Two-loop recursion with H0 = y's / y'y, pairs kept only where y's > eps."""

    memory: int = 20
    pairs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def direction(self, gradient: np.ndarray) -> np.ndarray:
        """-H g."""
        q, alphas = gradient.copy(), []
        for s, y in reversed(self.pairs):
            alphas.append(s @ q / (y @ s))
            q -= alphas[-1] * y
        if self.pairs:
            s, y = self.pairs[-1]
            q *= (y @ s) / (y @ y)
        for (s, y), alpha in zip(self.pairs, reversed(alphas), strict=True):
            q += s * (alpha - y @ q / (y @ s))
        return -q

    def update(self, s: np.ndarray, y: np.ndarray) -> None:
        """Keep the pair if its curvature is positive."""
        if y @ s > 1e-12 * (y @ y):
            self.pairs = [*self.pairs, (s, y)][-self.memory :]


@dataclass
class Row:
    """One line of the history; `step_size` is the step accepted before the evaluation."""

    step: int
    objective: float
    loss: float
    grad_norm: float
    step_size: float
    train_accuracy: float
    val_accuracy: float


def train(
    problem: PeaksProblem,
    parameters: Parameters,
    validation: Samples,
    steps: int,
    *,
    memory: int = 20,
    lr: float = 1.0,
    trials: int = 20,
) -> list[Row]:
    """Rows 0 .. steps of the optimisation history; row k is evaluated before update k."""
    lbfgs, theta = LBFGS(memory), flatten(parameters)
    rows, step_size = [], lr
    previous: tuple[np.ndarray, np.ndarray] | None = None
    for step in range(steps + 1):
        at = unflatten(theta, parameters)
        (objective, loss), gradient = problem.objective(at), flatten(problem.gradient(at))
        rows.append(
            Row(
                step,
                objective,
                loss,
                float(np.sqrt(gradient @ gradient)),
                step_size,
                problem.accuracy(at, problem.train),
                problem.accuracy(at, validation),
            )
        )
        if previous is not None:
            lbfgs.update(theta - previous[0], gradient - previous[1])
        previous = theta, gradient
        for direction in (lbfgs.direction(gradient), -gradient):
            slope, step_size = float(gradient @ direction), lr
            for _ in range(trials):
                trial = theta + step_size * direction
                if problem.objective(unflatten(trial, parameters))[0] <= objective + 1e-4 * step_size * slope:
                    break
                step_size *= 0.5
            else:
                lbfgs.pairs = []
                continue
            theta = trial
            break
        else:
            return rows
    return rows


def read_expected(path: Path) -> list[Row]:
    """Rows of expected.csv."""
    with path.open() as file:
        return [
            Row(
                int(r["iteration"]),
                float(r["objective"]),
                float(r["loss"]),
                float(r["gradient_norm"]),
                float(r["step"]),
                float(r["train_accuracy"]),
                float(r["validation_accuracy"]),
            )
            for r in csv.DictReader(file)
        ]
