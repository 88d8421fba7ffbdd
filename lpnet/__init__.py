"""Deep residual networks trained across their layers: the public names and nothing else.

A name is imported when it is first used, so that `import lpnet` needs neither torch nor MPI and starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpnet import nn
    from lpnet.config import MGRIT
    from lpnet.errors import LpnetError, UsageError
    from lpnet.fdg.decoupled import FDG
    from lpnet.fdg.pipeline import Pipeline
    from lpnet.mgrit.layer_parallel import LayerParallel
    from lpnet.mgrit.refine import refine
    from lpnet.mgrit.serial import gather_state_dict
    from lpnet.nn import models
    from lpnet.nn.network import Network
    from lpnet.nn.stack import LayerStack
    from lpnet.parallel.emulator import emulate
    from lpnet.parallel.grid import Grid
    from lpnet.parallel.interconnect import NetworkModel
    from lpnet.train.saving import load, save
    from lpnet.train.stages import refine_checkpoint

__version__ = "0.1.0"

_HOMES = {
    "FDG": "lpnet.fdg.decoupled",
    "Pipeline": "lpnet.fdg.pipeline",
    "Grid": "lpnet.parallel.grid",
    "MGRIT": "lpnet.config",
    "LayerParallel": "lpnet.mgrit.layer_parallel",
    "LayerStack": "lpnet.nn.stack",
    "LpnetError": "lpnet.errors",
    "Network": "lpnet.nn.network",
    "UsageError": "lpnet.errors",
    "NetworkModel": "lpnet.parallel.interconnect",
    "emulate": "lpnet.parallel.emulator",
    "gather_state_dict": "lpnet.mgrit.serial",
    "load": "lpnet.train.saving",
    "refine": "lpnet.mgrit.refine",
    "refine_checkpoint": "lpnet.train.stages",
    "save": "lpnet.train.saving",
}
_MODULES = {"models": "lpnet.nn.models", "nn": "lpnet.nn"}

__all__ = [
    "FDG",
    "MGRIT",
    "Grid",
    "LayerParallel",
    "LayerStack",
    "LpnetError",
    "Network",
    "NetworkModel",
    "Pipeline",
    "UsageError",
    "emulate",
    "gather_state_dict",
    "load",
    "models",
    "nn",
    "refine",
    "refine_checkpoint",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lpnet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
