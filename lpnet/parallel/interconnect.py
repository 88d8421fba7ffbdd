"""What a message costs between two ranks: latency and bandwidth, within a node and between nodes.

The model is that of Hockney (latency + bytes / bandwidth) with the processor's overhead per message of LogP
(Culler et al. 1993); nodes hold equally many consecutive ranks. Needs neither torch nor MPI. No communication.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from lpnet.errors import ConfigError

PRESETS = Path(__file__).with_name("interconnects.yaml")


@dataclass(frozen=True)
class NetworkModel:
    """Costs of messages.

    Args:
        name: what it models.
        ranks_per_node: consecutive ranks that share a node.
        intra_latency_s: seconds of an empty message within a node.
        intra_bandwidth: bytes per second within a node.
        inter_latency_s: seconds of an empty message between nodes.
        inter_bandwidth: bytes per second between nodes.
        send_overhead_s: processor seconds per message at the sender, and again at the receiver.
        cache_bytes: cache that a rank has to itself, its share of a shared one included. A rank finds in it what it
            used last; 0: nothing.
    """

    name: str = "custom"
    ranks_per_node: int = 32
    intra_latency_s: float = 0.6e-6
    intra_bandwidth: float = 10e9
    inter_latency_s: float = 1.5e-6
    inter_bandwidth: float = 12e9
    send_overhead_s: float = 1.5e-6
    cache_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ConfigError(f"network {self.name}: ranks_per_node is {self.ranks_per_node}; a node has 1 or more")
        for key in ("intra_latency_s", "inter_latency_s", "send_overhead_s", "cache_bytes"):
            value = getattr(self, key)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"network {self.name}: {key} is {value}; it must not be negative")
        for key in ("intra_bandwidth", "inter_bandwidth"):
            if not getattr(self, key) > 0:
                raise ConfigError(
                    f"network {self.name}: {key} is {getattr(self, key)}; it must be greater than 0 (bytes per second)"
                )

    def flight(self, source: int, dest: int, size: int) -> float:
        """Seconds that `size` bytes travel from one rank to another."""
        if source // self.ranks_per_node == dest // self.ranks_per_node:
            return self.intra_latency_s + size / self.intra_bandwidth
        return self.inter_latency_s + size / self.inter_bandwidth

    def collective(self, ranks: Sequence[int], size: int) -> float:
        """Seconds of a reduction or broadcast of `size` bytes over some ranks of the job.

        log2(P) messages, those within a node first, or twice as many of parts (Thakur, Rabenseifner and Gropp,
        "Optimization of collective communication operations in MPICH", 2005), whichever is faster.
        """
        inside, outside = _rounds(tuple(ranks), self.ranks_per_node)
        delay = inside * self.intra_latency_s + outside * self.inter_latency_s
        delay += (inside + outside) * 2 * self.send_overhead_s
        whole = inside * size / self.intra_bandwidth + outside * size / self.inter_bandwidth
        width = min(self.intra_bandwidth, self.inter_bandwidth) if outside else self.intra_bandwidth
        parts = 2 * size * (1 - 1 / len(ranks)) / width
        return delay + min(whole, delay + parts)

    def describe(self) -> str:
        """The parameters in one line, for the label of a prediction."""
        return (
            f"{self.name}: {self.ranks_per_node} ranks per node, latency {self.intra_latency_s * 1e6:g} us within and "
            f"{self.inter_latency_s * 1e6:g} us between nodes, {self.intra_bandwidth / 1e9:g} and "
            f"{self.inter_bandwidth / 1e9:g} GB/s, {self.send_overhead_s * 1e6:g} us of processor per message"
            + (f", {self.cache_bytes / 1e6:g} MB of cache per rank" if self.cache_bytes else ", caches cold")
        )

    def as_dict(self) -> dict[str, object]:
        """The parameters by name."""
        return asdict(self)


@lru_cache(maxsize=4096)
def _rounds(ranks: tuple[int, ...], ranks_per_node: int) -> tuple[int, int]:
    """Rounds of a tree over some ranks: within nodes, between nodes."""
    nodes = Counter(rank // ranks_per_node for rank in ranks)
    inside = math.ceil(math.log2(max(nodes.values())))
    return inside, max(math.ceil(math.log2(len(ranks))) - inside, math.ceil(math.log2(len(nodes))))


def presets(path: str | Path | None = None) -> dict[str, NetworkModel]:
    """The networks that are known by name: those of the package, and those of a file, which win.

    Raises:
        ConfigError: the file cannot be read, or holds an unknown key or a value out of range.
    """
    found: dict[str, NetworkModel] = {}
    for source in (PRESETS, *([Path(path)] if path is not None else [])):
        found |= _read(source)
    return found


def named(name: str, path: str | Path | None = None) -> NetworkModel:
    """The network of a name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    known = presets(path)
    if name not in known:
        nearest = get_close_matches(name, known, 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"there is no network {name!r}{hint}; known: {', '.join(known)}")
    return known[name]


def _read(path: Path) -> dict[str, NetworkModel]:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot read the networks: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or not all(isinstance(values, dict) for values in tree.values()):
        raise ConfigError(f"{path}: expected NAME: {{latency and bandwidth by key}}; see {PRESETS.name} of the package")
    keys = [field.name for field in fields(NetworkModel) if field.name != "name"]
    for name, values in tree.items():
        for key, value in values.items():
            if key not in keys:
                raise ConfigError(f"{path}: network {name} has the unknown key {key!r}; known: {', '.join(keys)}")
            try:
                values[key] = int(value) if key == "ranks_per_node" else float(value)
            except (TypeError, ValueError):
                raise ConfigError(f"{path}: network {name}: {key} is {value!r}; expected a number") from None
    return {str(name): NetworkModel(name=str(name), **values) for name, values in tree.items()}
