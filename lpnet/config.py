"""One frozen dataclass tree is one run; YAML files and command-line flags fill it.

Imports neither torch nor MPI, so that `lpnet plan` and a mistake in a file cost no time. Every
`__post_init__` raises ValueError with the numbers and the remedy. No communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lpnet.dataconfig import DataConfig
from lpnet.methodconfig import MGRIT, FDGConfig, not_negative, positive, require

__all__ = [
    "MGRIT",
    "Activation",
    "Config",
    "DataConfig",
    "FDGConfig",
    "Method",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
]

Method = Literal["serial", "mgrit", "fdg", "pipeline"]
RESNETS = ("resnet_cifar", "resnet_mnist", "resnet", "wide_resnet")
Activation = Literal["tanh", "relu", "smooth_relu"]


@dataclass(frozen=True)
class ModelConfig:
    """The network: opening, a stack of equal residual layers, closing; or a residual network of blocks.

    Args:
        name: dense: layers u + h sigma(W u + b); conv: u + h sigma(conv(u; W) + b) for images; ode_resnet: the CIFAR
            ResNet as three stacks of such layers with width, 2 width and 4 width channels and a transition of half the
            height and width between them (final_time, norm; all other keys of layers are given); resnet_cifar,
            resnet_mnist, resnet, wide_resnet: networks of units for method fdg, pipeline or serial, described by
            depth, widen, norm, stem and dropout.
        layers: number of layers N of the stack; ode_resnet: of the three stacks, a multiple of 3; two transitions
            come on top.
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
        depth: resnets: layers, as the papers count them; 6n + 2 for CIFAR and MNIST, 6n + 4 for wide_resnet.
        widen: wide_resnet: factor of the channels.
        norm: resnets, ode_resnet: batch | group normalisation; ode_resnet: none, u + h relu(conv u + b), which is
            written out and faster.
        stem: resnet: cifar (3 x 3 convolution) | imagenet (7 x 7 with stride, pooling).
        dropout: wide_resnet: share of activations dropped inside a block.
        split: resnet_cifar, resnet_mnist, resnet 18 and 34, wide_resnet: blocks that are two units each, such as
            block2.conv1, so that modules may be cut after that layer; their halves are called block2a and block2b.
    """

    name: Literal["dense", "conv", "ode_resnet", "resnet_cifar", "resnet_mnist", "resnet", "wide_resnet"] = "dense"
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
    depth: int = 20
    widen: int = 10
    norm: Literal["batch", "group", "none"] = "batch"
    stem: Literal["cifar", "imagenet"] = "cifar"
    dropout: float = 0.0
    split: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        positive("model", layers=self.layers, width=self.width, final_time=self.final_time, kernel=self.kernel)
        positive("model", depth=self.depth, widen=self.widen)
        require(
            not self.split or self.name in RESNETS,
            f"model.split is for blocks of {', '.join(RESNETS)}, not for {self.name}; leave it out",
        )
        require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}; it must lie in [0, 1)")
        require(
            self.kernel % 2 == 1, f"model.kernel is {self.kernel}; it must be odd, so that the state keeps its size"
        )
        if self.name == "conv":
            require(
                self.bias == "vector", f"model.bias is {self.bias!r}; convolutions have one bias per channel: vector"
            )
        require(
            self.name == "conv" or (self.opening != "replicate" and not self.pooling),
            "model.opening replicate and model.pooling are for images; set model.name conv",
        )
        require(
            self.norm != "none" or self.name == "ode_resnet",
            f"model.norm none is for ode_resnet, not for {self.name}; use batch or group",
        )
        require(
            self.name != "ode_resnet" or (self.layers % 3 == 0 and self.initial_parameters is None),
            f"model.name ode_resnet shares {self.layers} layers among 3 stacks, and reads no initial_parameters; use a "
            f"multiple of 3, such as {max(3, 3 * round(self.layers / 3))}",
        )
        not_negative("model", init_scale=self.init_scale)

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of every part of the network: stacks, and transitions of one layer."""
        third = self.layers // 3
        return (third, 1, third, 1, third) if self.name == "ode_resnet" else (self.layers,)

    @property
    def all_layers(self) -> int:
        """Layers that the ranks share, transitions included."""
        return sum(self.stages)

    @property
    def barriers(self) -> tuple[int, ...]:
        """Points that every level keeps: both ends of every transition; none where there is one stack."""
        if len(self.stages) == 1:
            return ()
        return tuple(sum(self.stages[:k]) for k in range(len(self.stages) + 1))


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
        decay_epochs: epochs after which the learning rate is multiplied by `decay`; not for lbfgs.
        decay: that factor.
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
    decay_epochs: list[int] = field(default_factory=list)
    decay: float = 0.1

    def __post_init__(self) -> None:
        require(
            not self.decay_epochs or self.name != "lbfgs",
            "optim.decay_epochs is for optimisers with a learning rate; lbfgs searches its step",
        )
        for epoch in self.decay_epochs:
            require(epoch > 0, f"optim.decay_epochs has {epoch}; epochs must be greater than 0")
        positive("optim", decay=self.decay)
        positive(
            "optim",
            lr=self.lr,
            memory=self.memory,
            line_search_trials=self.line_search_trials,
            clip_norm=self.clip_norm,
        )
        not_negative("optim", momentum=self.momentum, weight_decay=self.weight_decay, tikhonov=self.tikhonov)
        not_negative("optim", classifier_tikhonov=self.classifier_tikhonov, ddt=self.ddt)


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks and threads: data replicas x modules x ranks that share the layers.

    Args:
        replicas: data replicas, each of which is given its part of every batch; gradients are averaged.
        modules: modules of a replica that train decoupled (method fdg or pipeline): K; null: fdg.modules. Given here, a
            module of a stack of layers is a layer-parallel network that `layers` ranks share.
        layers: ranks that share the layers of a replica, or of a module; auto: as many as there are.
        partition: uniform: equally many layers per rank; by_cost: by measured cost; or a list of layers per rank.
        threads: threads per rank; null: cores of the affinity mask shared by the ranks on it (OMP_NUM_THREADS wins).
        malloc: raise glibc's malloc thresholds at launch.
    """

    replicas: int = 1
    modules: int | None = None
    layers: int | Literal["auto"] = "auto"
    partition: Literal["uniform", "by_cost"] | list[int] = "uniform"
    threads: int | None = None
    malloc: bool = False

    def __post_init__(self) -> None:
        positive("parallel", threads=self.threads, replicas=self.replicas, modules=self.modules)
        positive("parallel", layers=None if self.layers == "auto" else self.layers)


@dataclass(frozen=True)
class TrainConfig:
    """Nested iteration in depth: a network of few layers is trained first, then refined and trained on.

    Args:
        stages: layers of each stage, each a multiple of the one before; the last is model.layers. Empty: one stage.
        stage_steps: optimisation steps of every stage but the last, which takes what is left of run.steps.
        interpolation: of parameters and optimiser slots in layer time when a stage ends: constant | linear.
    """

    stages: list[int] = field(default_factory=list)
    stage_steps: list[int] = field(default_factory=list)
    interpolation: Literal["constant", "linear"] = "linear"

    def __post_init__(self) -> None:
        for name in ("stages", "stage_steps"):
            for value in getattr(self, name):
                require(value > 0, f"train.{name} has {value}; it must be greater than 0")
        require(
            len(self.stage_steps) == max(0, len(self.stages) - 1),
            f"train.stage_steps has {len(self.stage_steps)} entries and train.stages {len(self.stages)}; give the "
            f"steps of every stage but the last: {max(0, len(self.stages) - 1)}",
        )
        for coarse, fine in zip(self.stages, self.stages[1:], strict=False):
            require(
                fine % coarse == 0 and fine > coarse,
                f"train.stages is {self.stages}; {fine} is no multiple of {coarse}: every stage has a whole number of "
                "times the layers of the one before",
            )

    def layers_at(self, step: int) -> int | None:
        """Layers of the network that makes a step; None: there is one stage. No communication."""
        for layers, steps in zip(self.stages, self.stage_steps, strict=False):
            if step < steps:
                return layers
            step -= steps
        return self.stages[-1] if self.stages else None


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
        on_save_error: a checkpoint that cannot be written (full disk, quota, read-only or failing file system):
            stop ends the run at once with exit code 1, and nothing but the work since the last checkpoint is lost;
            continue warns and tries again at the next one, and fails only where the last one fails too.
        async_save: off: all ranks wait until a checkpoint is written; thread: a copy in memory is written by a
            background thread (needs an MPI that grants THREAD_MULTIPLE; else as step); step: the copy is written in
            parts between the steps that follow. Never two at once. The last one of a run is always waited for.
        stall_s: seconds that a step, a part of an evaluation or a save may take; then every rank prints its Python
            stack and its last messages, and the run ends with exit code 1; null: no limit.
        stop_margin_s: under SLURM the run stops with a checkpoint this many seconds before the end of the job's time,
            and sooner by two of its longest steps and its longest save.
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
    on_save_error: Literal["stop", "continue"] = "stop"
    async_save: Literal["off", "thread", "step"] = "off"
    stall_s: float | None = None
    stop_margin_s: float = 30.0
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    trace: bool = False
    plots: bool = True

    def __post_init__(self) -> None:
        not_negative("run", steps=self.steps, eval_every=self.eval_every, checkpoint_every=self.checkpoint_every)
        positive("run", keep=self.keep, stall_s=self.stall_s)
        not_negative("run", stop_margin_s=self.stop_margin_s)


@dataclass(frozen=True)
class Config:
    """A run: what is trained, on what, how, by whom, and where to."""

    seed: int = 0
    method: Method = "serial"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mgrit: MGRIT = field(default_factory=MGRIT)
    fdg: FDGConfig = field(default_factory=FDGConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
