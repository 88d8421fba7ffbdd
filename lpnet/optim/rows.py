"""Sums over layers and whole parameters that do not depend on the number of ranks, bit for bit.

Every layer has a leaf in one binary tree over the global layer index; a rank adds up the complete subtrees inside its
block and hands only their roots to the reduction (about 2 log2 N numbers at most, one where blocks are powers of two),
so that every rank finishes the same tree in the same order. Higham, "The accuracy of floating point summation", SISC
14(4), 1993, for the error of such pairwise sums: it grows with log2 N only.

    layers  0 1 2 3 | 4 5 6        rank 0 sends [0..3], rank 1 sends [4..5] and [6]
            `--.--'   `-' |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lpnet.errors import LpnetError
from lpnet.nn.kernels import SMALL, uses_numpy
from lpnet.parallel.partition import Partition
from lpnet.parallel.shard import Shard


def subtrees(low: int, high: int) -> list[tuple[int, int]]:
    """(first, size) of the largest aligned power-of-two blocks that tile [low, high). No communication."""
    blocks = []
    while low < high:
        size = low & -low if low else 1 << (high - 1).bit_length()
        while low + size > high:
            size //= 2
        blocks.append((low, size))
        low += size
    return blocks


def trainable(shards: Sequence[Shard]) -> list[Shard]:
    """The shards an optimiser changes: parameters that require a gradient, not buffers. No communication."""
    return [shard for shard in shards if shard.tensor.requires_grad]


class RowSum:
    """The summation order of one set of shards.

    Nothing here communicates: `pack` local terms, sum the result over the ranks (`Comm.sum`, alone or as part of a
    larger array), and `total` the sum. Whole parameters are added per group, the first word of their names.

    Args:
        shards: this rank's parameters; stacked ones share their rows.
        partition: which rank owns which rows.
        groups: first words of the names of whole parameters, each group on one rank.
        starts: for networks of several stacks: first word of a stack's or transition's names -> its first layer. A
            transition's whole parameters are one row.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        partition: Partition,
        groups: Sequence[str] = ("opening", "closing"),
        starts: Mapping[str, int] | None = None,
    ) -> None:
        self._shards, self._groups = list(shards), list(groups)
        self._rows = [_global_rows(shard, starts or {}) for shard in shards]
        for shard, found in zip(shards, self._rows, strict=True):
            if found is None and shard.name.split(".")[0] not in groups:
                raise LpnetError(f"{shard.name} is a whole parameter outside the groups {', '.join(groups)}")
        blocks = [partition.block(rank) for rank in range(partition.ranks)]
        rows = {found for found in self._rows if found is not None}
        block = (min(low for low, _ in rows), max(high for _, high in rows)) if rows else (0, 0)
        if starts is None and (len(rows) > 1 or not rows <= set(blocks)):
            raise LpnetError(
                f"stacked parameters must share the rows of one block of {partition.bounds}; got {sorted(rows)}"
            )
        if starts is not None and rows:  # a layer without parameters has no row here
            block = partition.block(partition.owner(block[0]))
        nodes = [node for low, high in blocks for node in subtrees(low, high)]
        self._nodes = {node: index for index, node in enumerate(nodes)}
        self._mine = subtrees(*block)
        self._root, self._additions = self._plan(partition.layers)
        self._first, self._high = block
        self.length = len(nodes) + len(self._groups)

    def pack(self, terms: Sequence[np.ndarray]) -> np.ndarray:
        """Local terms as an array to be summed over the ranks. No communication.

        Args:
            terms: one float64 array per shard: (sums, rows) where stacked, (sums,) otherwise.

        Returns:
            (sums, length), zero where another rank has the term.
        """
        out = np.zeros((terms[0].shape[0] if terms else 1, self.length))
        stacked = [(term, at) for term, at in zip(terms, self._rows, strict=True) if at is not None]
        if stacked:
            rows = np.zeros((out.shape[0], self._high - self._first))
            for term, (low, high) in stacked:
                rows[:, low - self._first : high - self._first] += term.reshape(out.shape[0], -1)
            for node in self._mine:
                part = rows[:, node[0] - self._first : node[0] - self._first + node[1]]
                while part.shape[1] > 1:
                    part = part[:, ::2] + part[:, 1::2]
                out[:, self._nodes[node]] = part[:, 0]
        for term, shard, at in zip(terms, self._shards, self._rows, strict=True):
            if at is None:
                out[:, len(self._nodes) + self._groups.index(shard.name.split(".")[0])] += term
        return out

    def total(self, summed: np.ndarray) -> np.ndarray:
        """The totals (sums,) of a packed array (sums, length) that was summed over the ranks. No communication."""
        nodes = len(self._nodes)
        values = np.empty((len(summed), nodes + sum(len(left) for left, _ in self._additions)))
        values[:, :nodes] = summed[:, :nodes]
        at = nodes
        for left, right in self._additions:
            values[:, at : at + len(left)] = values[:, left] + values[:, right]
            at += len(left)
        total = values[:, self._root].copy()
        for index in range(nodes, self.length):
            total += summed[:, index]
        return total

    def _plan(self, layers: int) -> tuple[int, list[tuple[np.ndarray, np.ndarray]]]:
        """Where the root is, and the pairs of nodes to be added, the smallest subtrees first: a sum follows the nodes
        in the order of the pairs."""
        places, additions, at = dict(self._nodes), [], len(self._nodes)
        size = 1
        while size < layers:
            pairs = []
            for first in range(0, layers, 2 * size):
                left = places.get((first, size))
                if left is None:
                    continue  # below a node that a rank adds up
                if first + size >= layers:
                    places[first, 2 * size] = left
                else:
                    places[first, 2 * size] = at
                    pairs.append((left, places[first + size, size]))
                    at += 1
            if pairs:
                left_side, right_side = np.array(pairs).T
                additions.append((left_side, right_side))
            size *= 2
        return places[0, size], additions


def _global_rows(shard: Shard, starts: Mapping[str, int]) -> tuple[int, int] | None:
    """The layers that a shard belongs to; None for a whole parameter of an end."""
    start = starts.get(shard.name.split(".")[0], 0)
    if shard.rows is None:
        return (start, start + 1) if shard.name.split(".")[0] in starts else None
    return start + shard.rows[0], start + shard.rows[1]


def dots(left: torch.Tensor, right: torch.Tensor, *, stacked: bool) -> np.ndarray:
    """Scalar products of `left`'s entries with `right`, per layer row where stacked, in float64. No communication.

    Args:
        left: (sums, ...) tensors of `right`'s shape.
        right: (rows, ...) where stacked, any shape otherwise.

    Returns:
        (sums, rows) where stacked, (sums,) otherwise. A row's bits do not depend on the number of rows.
    """
    rows = right.shape[0] if stacked else 1
    if uses_numpy(right) and right.numel() <= SMALL * rows:
        b = right.detach().reshape(rows, -1).numpy()
        a = left.detach().reshape(len(left), *b.shape).numpy()  # there may be no sums
        small: np.ndarray = np.multiply(a, b, dtype=np.float64).sum(-1)
        return small if stacked else small[:, 0]
    if right.dtype in (torch.bfloat16, torch.float16):  # products of 16-bit numbers need more bits than they have
        left, right = left.float(), right.float()
    flat = right.reshape(rows, -1)
    out = np.empty((left.shape[0], rows))
    chunk = max(1, (1 << 22) // max(1, right.numel()))
    for start in range(0, left.shape[0], chunk):
        product = left[start : start + chunk].reshape(-1, *flat.shape) * flat
        out[start : start + chunk] = product.sum(-1, dtype=torch.float64).cpu().numpy()
    return out if stacked else out[:, 0]


def squares(tensors: Sequence[torch.Tensor | None], shards: Sequence[Shard]) -> list[np.ndarray]:
    """Squared norms of one tensor per shard (None counts as zero), as terms for `RowSum.pack`. No communication."""
    terms = []
    for tensor, shard in zip(tensors, shards, strict=True):
        stacked = shard.rows is not None
        if tensor is None:
            terms.append(np.zeros((1, shard.tensor.shape[0]) if stacked else (1,)))
        else:
            terms.append(dots(tensor.detach()[None], tensor.detach(), stacked=stacked))
    return terms
