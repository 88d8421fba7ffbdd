"""The settings of the two methods: multigrid over the layers (MGRIT) and decoupled modules (FDG).

Imports neither torch nor MPI. Every `__post_init__` raises ValueError with the numbers and the remedy. No messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

InitialGuess = Literal["zero", "constant", "coarse", "kept", "class_mean"]


def require(condition: bool, message: str) -> None:
    """Raise ValueError with a message where a condition does not hold."""
    if not condition:
        raise ValueError(message)


def positive(section: str, **values: float | None) -> None:
    """Raise ValueError where a value is not greater than 0; None passes."""
    for key, value in values.items():
        require(value is None or value > 0, f"{section}.{key} is {value}; it must be greater than 0")


def not_negative(section: str, **values: float | None) -> None:
    """Raise ValueError where a value is negative; None passes."""
    for key, value in values.items():
        require(value is None or value >= 0, f"{section}.{key} is {value}; it must not be negative")


@dataclass(frozen=True)
class MGRIT:
    """Multigrid over the layers, for the forward and the adjoint direction (Günther et al. 2020).

    Args:
        levels: grids, the finest included; 1 is serial propagation.
        coarsening: c; every c-th point of a level makes the next; one number or one per level.
        relaxation: F, FCF, FCFCF, ...; one word or one per level.
        c_weight: weight w of C-relaxation, new = w C + (1 - w) old; one number or one per level.
        coarse: weights of a coarse step of s layers: injected (of its first layer, which costs least: the value of the
            fine step is used again) | averaged (mean of all s layers) | half_steps (two steps of s/2, with the first
            and the middle layer: two evaluations). For dense and convolutional layers.
        coarse_messages: what travels between ranks on coarse levels: own (numbers as they are) | float32 | bfloat16
            (corrections, rounded to fewer bits; an exact guess stays a fixed point).
        cycle: V, or F (a V-cycle follows on every level on the way up).
        forward_iterations: iterations of every forward solve; null iterates to the tolerance.
        adjoint_iterations: the same for the adjoint solve.
        tolerance: absolute bound on the residual norm sqrt(sum over C-points ||r||^2 / batch).
        relative_tolerance: the same relative to the norm of the states. With neither given and no fixed
            iterations, 1e-12 in float64 and 1e-5 otherwise, relative.
        max_iterations: cap when iterating to a tolerance.
        initial_guess: zero | constant (u_0 everywhere) | coarse (propagate the coarsest grid first; that start
            counts as iteration 1) | kept (states of the solve before, for the same batch; cold: `coarse`) |
            class_mean (the mean state of every sample's class in the batches before, for samples never seen).
        skip_first_down: start every solve from the coarsest grid; the same as initial_guess coarse.
        min_coarse: coarsen no further once a level would have fewer points than this.
        buffer_layers: the first and the last so many layers are kept on every level: the coarse solve propagates them
            exactly, one by one.
        storage: all points | c_points (recompute the F-points in the adjoint; memory for time).
        batching: relax the j-th layers of all of a rank's intervals in one call: on | off | auto (measured once at
            the start, for all ranks, and kept: the resolved configuration lists on or off per level).
        spatial: coarse levels evaluate the layers on smaller states: none | average (means of blocks, constant blocks
            back) | bilinear | user (LayerParallel's transfer=). For images (batch, channels, height, width), and layers
            that take any size.
        spatial_factor: of height and width of the states on level 1, 2, ...; one number for all of them or one per
            level from level 1 on (the last holds for deeper ones); 1: full states.
        microbatches: levels 1: a batch goes through the layers in so many parts, one behind the other: all ranks
            work at once, an exact pipeline. Multigrid keeps the batch whole.
        control: fixed: iterations as they are set, watched: a warning where the gradient goes wrong, a stop where
            solves diverge. residual: iterate until the residual is `reduction` of the first one, at most
            forward_iterations and adjoint_iterations, or max_iterations without them. adaptive: more iterations, then
            fewer levels, then serial propagation where the gradient's cosine falls below min_cosine, and back again.
        check_every: steps between comparisons of the gradient with that of exact propagation; auto: as far apart as
            keeps their cost below 3 % of the steps, on these ranks, or, where they change the run (control adaptive,
            L-BFGS), on any number of ranks; 0: none.
        min_cosine: a gradient whose cosine with the exact one is below is wrong.
        reduction: of control residual.
        cache_mib: memory per rank in MiB for states kept per batch; null: as much as they take.
        cache_spill: batches beyond it: drop (their next solves start cold) | disk (files in TMPDIR).
        cache_dtype: what states are kept in: same (as the states) | float32 | bfloat16.
        adjoint: settings of the adjoint direction that differ, by name (levels, coarsening, relaxation, c_weight,
            cycle, tolerance, relative_tolerance, max_iterations, initial_guess).
    """

    levels: int = 2
    coarsening: int | list[int] = 4
    relaxation: str | list[str] = "F"
    c_weight: float | list[float] = 1.0
    coarse: Literal["injected", "averaged", "half_steps"] = "injected"
    coarse_messages: Literal["own", "float32", "bfloat16"] = "own"
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
    spatial: Literal["none", "average", "bilinear", "user"] = "none"
    spatial_factor: int | list[int] = 2
    microbatches: int = 1
    control: Literal["fixed", "residual", "adaptive"] = "fixed"
    check_every: int | Literal["auto"] = "auto"
    min_cosine: float = 0.99
    reduction: float = 0.01
    cache_mib: float | None = None
    cache_spill: Literal["drop", "disk"] = "drop"
    cache_dtype: Literal["same", "float32", "bfloat16"] = "same"
    adjoint: dict[str, int | float | str | list[int] | list[float] | list[str] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive(
            "mgrit",
            levels=self.levels,
            forward_iterations=self.forward_iterations,
            adjoint_iterations=self.adjoint_iterations,
            microbatches=self.microbatches,
        )
        require(
            self.microbatches == 1 or self.levels == 1,
            f"mgrit.microbatches is {self.microbatches} with {self.levels} levels; parts of a batch follow each other "
            "through the ranks of exact propagation: set mgrit.levels 1, or leave microbatches out",
        )
        positive(
            "mgrit",
            tolerance=self.tolerance,
            relative_tolerance=self.relative_tolerance,
            max_iterations=self.max_iterations,
        )
        require(self.buffer_layers >= 0, f"mgrit.buffer_layers is {self.buffer_layers}; it must be 0 or more")
        require(self.min_coarse >= 2, f"mgrit.min_coarse is {self.min_coarse}; a level needs 2 points or more")
        for c in self.coarsening if isinstance(self.coarsening, list) else [self.coarsening]:
            require(c >= 2, f"mgrit.coarsening is {c}; it must be 2 or more")
        for r in self.relaxation if isinstance(self.relaxation, list) else [self.relaxation]:
            require(
                set(r[1::2]) <= {"C"} and set(r[::2]) == {"F"} and len(r) % 2 == 1,
                f"mgrit.relaxation is {r!r}; it must be F, FCF, FCFCF, ...",
            )
        for w in self.c_weight if isinstance(self.c_weight, list) else [self.c_weight]:
            require(0 < w <= 2, f"mgrit.c_weight is {w}; it must lie in (0, 2]")
        for factor in self.spatial_factor if isinstance(self.spatial_factor, list) else [self.spatial_factor]:
            require(factor >= 1, f"mgrit.spatial_factor is {factor}; it must be 1 or more")
        require(
            self.coarse == "injected" or self.spatial == "none",
            f"mgrit.coarse is {self.coarse} with mgrit.spatial {self.spatial}; coarse levels with smaller states have "
            "the weights of the layers: set one of them back to injected or none",
        )
        self._check_control()
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
        require(
            not unknown,
            f"mgrit.adjoint has the unknown key {unknown[0] if unknown else ''!r}; known: {', '.join(sorted(allowed))}",
        )
        if self.adjoint:
            self.for_adjoint()
        for key in ("levels", "coarsening"):
            own = getattr(self, key)
            require(
                self.storage == "all" or self.adjoint.get(key, own) == own,
                f"mgrit.storage c_points needs the same {key} in both directions; drop mgrit.adjoint.{key}",
            )

    @property
    def spatial_factors(self) -> tuple[int, ...]:
        """The factor of every level; 1 on level 0. Maps of a user count as factor 2."""
        given = self.spatial_factor if isinstance(self.spatial_factor, list) else [self.spatial_factor]
        if self.spatial in ("none", "user") or not given:
            return (1, *([2 if self.spatial == "user" else 1] * (self.levels - 1)))
        return (1, *(given[min(level, len(given) - 1)] for level in range(self.levels - 1)))

    def _check_control(self) -> None:
        positive("mgrit", cache_mib=self.cache_mib, reduction=self.reduction)
        require(self.reduction < 1, f"mgrit.reduction is {self.reduction}; it must be less than 1")
        require(-1 < self.min_cosine < 1, f"mgrit.min_cosine is {self.min_cosine}; it must lie in (-1, 1)")
        if not isinstance(self.check_every, str):
            require(self.check_every >= 0, f"mgrit.check_every is {self.check_every}; it must be auto, or 0 or more")
        if self.control == "adaptive":
            for key in ("forward_iterations", "adjoint_iterations"):
                require(
                    getattr(self, key) is not None,
                    f"mgrit.{key} is null; control adaptive goes up from it and back: give 2 and 1, for example",
                )
            require(
                self.check_every != 0,
                "mgrit.check_every is 0; control adaptive decides by comparisons: give auto or a number of steps",
            )

    def for_adjoint(self) -> MGRIT:
        """The settings with `adjoint` applied."""
        return replace(self, **self.adjoint, adjoint={})  # type: ignore[arg-type]


@dataclass(frozen=True)
class FDGConfig:
    """Modules that train at the same time with delayed gradients (Zhuang et al. 2021), or an exact pipeline.

    Args:
        modules: K; null: as many as ranks. On one rank all modules run side by side, with the same bits.
        cuts: by_cost: measured once on the first batch, so that the slowest module is as fast as can be; uniform:
            equally many units; or the index of the first unit of every module after the first.
        schedule: fdg; ddg: forward locked, backward delayed; fr: features replay; bp: backpropagation.
        order: what a module does first in a tick: backward_first | forward_first; null: as published.
        backward: the weights a delayed gradient is made for: stash (those of its forward), recompute (the present
            ones), mixed (old activations, present weights); null: recompute for fr, stash otherwise.
        shrink: beta in (0, 1]: a gradient is multiplied by it whenever it enters a module.
        prediction: forward with predicted weights: full | half horizon; null: off.
        spike: spike compensation, for sgd with momentum.
        accumulate: batches per update.
        anneal: batches over which the delay-dependent reduction of the learning rate is taken back; 0: off.
        nesterov: discounted Nesterov momentum, for sgd with momentum.
        gradient_dtype: precision in which gradients travel; null: as they are.
        microbatches: method pipeline: parts of a batch.
        pipeline_order: method pipeline: 1f1b | gpipe.
        staleness_every: batches between two measurements of how stale the gradients are, written to metrics.jsonl:
            cosine with the gradient that backpropagation would have, and drift of the weights, per module; 0: none.
    """

    modules: int | None = None
    cuts: Literal["by_cost", "uniform"] | list[int] = "by_cost"
    schedule: Literal["fdg", "ddg", "fr", "bp"] = "fdg"
    order: Literal["backward_first", "forward_first"] | None = None
    backward: Literal["stash", "recompute", "mixed"] | None = None
    shrink: float = 1.0
    prediction: Literal["full", "half"] | None = None
    spike: bool = False
    accumulate: int = 1
    anneal: int = 0
    nesterov: bool = False
    gradient_dtype: Literal["float16", "bfloat16"] | None = None
    microbatches: int = 4
    pipeline_order: Literal["1f1b", "gpipe"] = "1f1b"
    staleness_every: int = 0

    def __post_init__(self) -> None:
        positive("fdg", modules=self.modules, accumulate=self.accumulate, microbatches=self.microbatches)
        require(0 < self.shrink <= 1, f"fdg.shrink is {self.shrink}; it must lie in (0, 1], where 1 shrinks nothing")
        not_negative("fdg", anneal=self.anneal, staleness_every=self.staleness_every)
        if isinstance(self.cuts, list):
            require(
                self.cuts == sorted(set(self.cuts)) and all(cut > 0 for cut in self.cuts),
                f"fdg.cuts is {self.cuts}; it must be increasing positive unit indices, one per module after the first",
            )
