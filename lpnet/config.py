"""One frozen dataclass tree is one run; YAML files and command-line flags fill it.

Imports neither torch nor MPI, so that `lpnet plan` and a mistake in a file cost no time. Every
`__post_init__` raises ValueError with the numbers and the remedy. No communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Method = Literal["serial", "mgrit"]
Activation = Literal["tanh", "relu", "smooth_relu"]
InitialGuess = Literal["zero", "constant", "coarse", "kept"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _positive(section: str, **values: float | None) -> None:
    for key, value in values.items():
        _require(value is None or value > 0, f"{section}.{key} is {value}; it must be greater than 0")


def _not_negative(section: str, **values: float | None) -> None:
    for key, value in values.items():
        _require(value is None or value >= 0, f"{section}.{key} is {value}; it must not be negative")


@dataclass(frozen=True)
class ModelConfig:
    """The network: opening, a stack of equal residual layers, closing.

    Args:
        name: kind of layer; dense: u + h sigma(W u + b); conv: u + h sigma(conv(u; W) + b) for images.
        layers: number of layers N of the stack.
        width: features of the state; channels where the layers are convolutions.
        kernel: conv: odd width of the kernel.
        final_time: T; a layer is a time step of h = T / N.
        activation: sigma.
        bias: one number per layer (scalar; dense only) or one per feature or channel (vector).
        opening: zero_expand pads the input's features or channels with zeros to `width`; dense is sigma(W x + b), a
            convolution for images; replicate copies an image of one channel to all channels; identity passes it on.
        pooling: conv: the classifier sees the mean of every channel instead of every pixel.
        init_scale: standard deviation of the initial weights times sqrt(width); biases start at zero.
        initial_parameters: an .npz file in data.root with the initial parameters (hidden_weight, hidden_bias,
            classifier_weight, classifier_bias), in place of random ones.
        dtype: precision of parameters and states.
    """

    name: Literal["dense", "conv"] = "dense"
    layers: int = 32
    width: int = 8
    kernel: int = 3
    final_time: float = 5.0
    activation: Activation = "tanh"
    bias: Literal["scalar", "vector"] = "vector"
    opening: Literal["zero_expand", "dense", "replicate", "identity"] = "zero_expand"
    pooling: bool = False
    init_scale: float = 0.3
    initial_parameters: str | None = None
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _positive("model", layers=self.layers, width=self.width, final_time=self.final_time, kernel=self.kernel)
        _require(
            self.kernel % 2 == 1, f"model.kernel is {self.kernel}; it must be odd, so that the state keeps its size"
        )
        if self.name == "conv":
            _require(
                self.bias == "vector", f"model.bias is {self.bias!r}; convolutions have one bias per channel: vector"
            )
        _require(
            self.name == "conv" or (self.opening != "replicate" and not self.pooling),
            "model.opening replicate and model.pooling are for images; set model.name conv",
        )
        _not_negative("model", init_scale=self.init_scale)


@dataclass(frozen=True)
class DataConfig:
    """The samples.

    Args:
        name: peaks (generated) | peaks_files (four .dat files in `root`) | hyperspectral (a scene: two .mat files in
            `root`) | spectra (a table of spectra and its labels: two .mat files in `root`) | mnist (four idx files,
            gzip or not, in `root`).
        root: folder of the data files.
        train_samples: training samples in all; null: all there are (peaks: 5000). peaks: equally many per class;
            the others: a subset drawn by the seed that keeps the shares of the classes, of all training samples
            (mnist, peaks_files) or of those that train_fraction leaves (hyperspectral, spectra).
        validation_samples: the same for validation; null: all there are (peaks: 1000).
        cube: hyperspectral: .mat file of the scene, (rows, columns, bands); spectra: of the table, (samples, bands).
        ground_truth: hyperspectral: .mat file of the labels, (rows, columns); spectra: (samples, 1). Label 0 means
            unlabelled; the other labels become classes 0, 1, ... in increasing order.
        cube_variable: name of the variable in `cube`; null: the one that has the shape.
        ground_truth_variable: name of the variable in `ground_truth`; null: the one that has the shape.
        train_fraction: hyperspectral, spectra: share of every class's labelled samples that is trained on; the rest
            validates.
        batch_size: samples per step; null is the full batch.
    """

    name: Literal["peaks", "peaks_files", "hyperspectral", "spectra", "mnist"] = "peaks"
    root: str | None = None
    train_samples: int | None = None
    validation_samples: int | None = None
    cube: str | None = None
    ground_truth: str | None = None
    cube_variable: str | None = None
    ground_truth_variable: str | None = None
    train_fraction: float = 0.5
    batch_size: int | None = None

    def __post_init__(self) -> None:
        _positive("data", train_samples=self.train_samples, validation_samples=self.validation_samples)
        _positive("data", batch_size=self.batch_size)
        _require(
            0 < self.train_fraction < 1, f"data.train_fraction is {self.train_fraction}; it must lie between 0 and 1"
        )
        _require(
            self.name == "peaks" or self.root is not None, f"data.name {self.name} reads files; give --data.root FOLDER"
        )
        if self.name in ("hyperspectral", "spectra"):
            _require(
                self.cube is not None and self.ground_truth is not None,
                f"data.name {self.name} needs data.cube and data.ground_truth (.mat file names in data.root)",
            )


@dataclass(frozen=True)
class MGRIT:
    """Multigrid over the layers, for the forward and the adjoint direction (Günther et al. 2020).

    Args:
        levels: grids, the finest included; 1 is serial propagation.
        coarsening: c; every c-th point of a level makes the next; one number or one per level.
        relaxation: F, FCF, FCFCF, ...; one word or one per level.
        c_weight: weight w of C-relaxation, new = w C + (1 - w) old; one number or one per level.
        cycle: V, or F (a V-cycle follows on every level on the way up).
        forward_iterations: iterations of every forward solve; null iterates to the tolerance.
        adjoint_iterations: the same for the adjoint solve.
        tolerance: absolute bound on the residual norm sqrt(sum over C-points ||r||^2 / batch).
        relative_tolerance: the same relative to the norm of the states. With neither given and no fixed
            iterations, 1e-12 in float64 and 1e-5 otherwise, relative.
        max_iterations: cap when iterating to a tolerance.
        initial_guess: zero | constant (u_0 everywhere) | coarse (propagate the coarsest grid first; that start
            counts as iteration 1) | kept (states of the solve before, for the same batch; cold: `coarse`).
        skip_first_down: start every solve from the coarsest grid; the same as initial_guess coarse.
        min_coarse: coarsen no further once a level would have fewer points than this.
        buffer_layers: the first and the last so many layers are kept on every level: the coarse solve propagates them
            exactly, one by one.
        storage: all points | c_points (recompute the F-points in the adjoint; memory for time).
        batching: relax the j-th layers of all of a rank's intervals in one call: on | off | auto (measured once at
            the start, for all ranks, and kept: the resolved configuration lists on or off per level).
        adjoint: settings of the adjoint direction that differ, by name (levels, coarsening, relaxation, c_weight,
            cycle, tolerance, relative_tolerance, max_iterations, initial_guess).
    """

    levels: int = 2
    coarsening: int | list[int] = 4
    relaxation: str | list[str] = "F"
    c_weight: float | list[float] = 1.0
    cycle: Literal["V", "F"] = "V"
    forward_iterations: int | None = None
    adjoint_iterations: int | None = None
    tolerance: float | None = None
    relative_tolerance: float | None = None
    max_iterations: int = 100
    initial_guess: InitialGuess = "kept"
    skip_first_down: bool = False
    min_coarse: int = 2
    buffer_layers: int = 0
    storage: Literal["all", "c_points"] = "all"
    batching: Literal["auto", "on", "off"] | list[Literal["on", "off"]] = "off"
    adjoint: dict[str, int | float | str | list[int] | list[float] | list[str] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _positive(
            "mgrit",
            levels=self.levels,
            forward_iterations=self.forward_iterations,
            adjoint_iterations=self.adjoint_iterations,
        )
        _positive(
            "mgrit",
            tolerance=self.tolerance,
            relative_tolerance=self.relative_tolerance,
            max_iterations=self.max_iterations,
        )
        _require(self.buffer_layers >= 0, f"mgrit.buffer_layers is {self.buffer_layers}; it must be 0 or more")
        _require(self.min_coarse >= 2, f"mgrit.min_coarse is {self.min_coarse}; a level needs 2 points or more")
        for c in self.coarsening if isinstance(self.coarsening, list) else [self.coarsening]:
            _require(c >= 2, f"mgrit.coarsening is {c}; it must be 2 or more")
        for r in self.relaxation if isinstance(self.relaxation, list) else [self.relaxation]:
            _require(
                set(r[1::2]) <= {"C"} and set(r[::2]) == {"F"} and len(r) % 2 == 1,
                f"mgrit.relaxation is {r!r}; it must be F, FCF, FCFCF, ...",
            )
        for w in self.c_weight if isinstance(self.c_weight, list) else [self.c_weight]:
            _require(0 < w <= 2, f"mgrit.c_weight is {w}; it must lie in (0, 2]")
        allowed = {
            "levels",
            "coarsening",
            "relaxation",
            "c_weight",
            "cycle",
            "tolerance",
            "relative_tolerance",
            "max_iterations",
            "initial_guess",
        }
        unknown = sorted(set(self.adjoint) - allowed)
        _require(
            not unknown,
            f"mgrit.adjoint has the unknown key {unknown[0] if unknown else ''!r}; known: {', '.join(sorted(allowed))}",
        )
        if self.adjoint:
            self.for_adjoint()
        for key in ("levels", "coarsening"):
            own = getattr(self, key)
            _require(
                self.storage == "all" or self.adjoint.get(key, own) == own,
                f"mgrit.storage c_points needs the same {key} in both directions; drop mgrit.adjoint.{key}",
            )

    def for_adjoint(self) -> MGRIT:
        """The settings with `adjoint` applied."""
        from dataclasses import replace

        return replace(self, **self.adjoint, adjoint={})  # type: ignore[arg-type]


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and the regularisation terms of the objective.

    Args:
        name: lbfgs, or an optimiser of torch.optim.
        lr: step size; for lbfgs the first trial step of the line search.
        momentum: sgd.
        weight_decay: decoupled for adamw, as torch has it otherwise.
        memory: lbfgs: pairs kept.
        line_search_trials: lbfgs: trials before the search counts as failed.
        tikhonov: gamma_tik: gamma/2 (sum ||theta_i||^2 + ||theta_opening||^2).
        classifier_tikhonov: gamma_class: gamma/2 ||theta_closing||^2.
        ddt: gamma_ddt: gamma/2 sum_{i>=1} ||(theta_i - theta_{i-1})/h||^2.
        clip_norm: largest global gradient norm; null: no clipping.
    """

    name: Literal["lbfgs", "sgd", "adam", "adamw", "rmsprop", "adagrad"] = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    memory: int = 20
    line_search_trials: int = 20
    tikhonov: float = 0.0
    classifier_tikhonov: float = 0.0
    ddt: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        _positive(
            "optim",
            lr=self.lr,
            memory=self.memory,
            line_search_trials=self.line_search_trials,
            clip_norm=self.clip_norm,
        )
        _not_negative("optim", momentum=self.momentum, weight_decay=self.weight_decay, tikhonov=self.tikhonov)
        _not_negative("optim", classifier_tikhonov=self.classifier_tikhonov, ddt=self.ddt)


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks and threads.

    Args:
        partition: uniform: equally many layers per rank; by_cost: by measured cost; or a list of layers per rank.
        threads: threads per rank; null: cores of the affinity mask shared by the ranks on it (OMP_NUM_THREADS wins).
        malloc: raise glibc's malloc thresholds at launch.
    """

    partition: Literal["uniform", "by_cost"] | list[int] = "uniform"
    threads: int | None = None
    malloc: bool = False

    def __post_init__(self) -> None:
        _positive("parallel", threads=self.threads)


@dataclass(frozen=True)
class RunConfig:
    """How long, where to, how often.

    Args:
        out: run folder; must not hold a run unless resumed; null makes runs/NAME-DATE.
        steps: optimisation steps.
        eval_every: steps between evaluations by exact propagation; 0: only at the end.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        keep: newest checkpoints kept.
        resume: auto (newest valid checkpoint of `out`, if any) | never | a checkpoint file.
        log_level: DEBUG | INFO | WARNING.
        trace: write trace.json, a Chrome trace with one row per rank.
        plots: draw PNG pictures at the end.
    """

    out: str | None = None
    steps: int = 100
    eval_every: int = 10
    checkpoint_every: int = 50
    keep: int = 2
    resume: str = "never"
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    trace: bool = False
    plots: bool = True

    def __post_init__(self) -> None:
        _not_negative("run", steps=self.steps, eval_every=self.eval_every, checkpoint_every=self.checkpoint_every)
        _positive("run", keep=self.keep)


@dataclass(frozen=True)
class Config:
    """A run: what is trained, on what, how, by whom, and where to."""

    seed: int = 0
    method: Method = "serial"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mgrit: MGRIT = field(default_factory=MGRIT)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
