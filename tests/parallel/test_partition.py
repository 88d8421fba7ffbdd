"""Partition: every layer has one owner, blocks are even, and by_cost cannot be bettered."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpnet.errors import UsageError
from lpnet.parallel.partition import Partition, by_cost, explicit, uniform

sizes = st.integers(1, 200).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers)))


def check(partition: Partition, layers: int, ranks: int) -> None:
    assert (partition.layers, partition.ranks) == (layers, ranks)
    blocks = [partition.block(rank) for rank in range(ranks)]
    assert [layer for first, end in blocks for layer in range(first, end)] == list(range(layers))
    assert all(end > first for first, end in blocks)
    assert all(
        partition.owner(layer) == rank for rank, (first, end) in enumerate(blocks) for layer in range(first, end)
    )
    assert partition.owner(layers) == ranks - 1


def largest(partition: Partition, costs: list[float]) -> float:
    return max(sum(costs[slice(*partition.block(rank))]) for rank in range(partition.ranks))


@given(sizes)
def test_uniform_blocks_differ_by_one_layer(size: tuple[int, int]) -> None:
    layers, ranks = size
    partition = uniform(layers, ranks)
    check(partition, layers, ranks)
    lengths = [end - first for first, end in pairwise(partition.bounds)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_uniform_table() -> None:
    assert uniform(10, 4).bounds == (0, 3, 6, 8, 10)
    assert uniform(3, 3).bounds == (0, 1, 2, 3)


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9).flatmap(
        lambda c: st.tuples(st.just(c), st.integers(1, len(c)))
    )
)
def test_by_cost_is_as_good_as_the_best_of_all_partitions(case: tuple[list[float], int]) -> None:
    costs, ranks = case
    layers = len(costs)
    partition = by_cost(costs, ranks)
    check(partition, layers, ranks)
    every = (Partition((0, *cuts, layers)) for cuts in combinations(range(1, layers), ranks - 1))
    best = min(largest(candidate, costs) for candidate in every)
    assert largest(partition, costs) <= best * (1 + 1e-12)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=60).flatmap(
        lambda c: st.tuples(st.just(c), st.integers(1, len(c)))
    )
)
def test_by_cost_covers_all_layers_with_equal_costs_in_it(case: tuple[list[int], int]) -> None:
    costs, ranks = case
    partition = by_cost(costs, ranks)
    check(partition, len(costs), ranks)
    assert largest(partition, list(map(float, costs))) <= largest(uniform(len(costs), ranks), list(map(float, costs)))


@given(sizes)
def test_by_cost_of_equal_layers_is_as_even_as_uniform(size: tuple[int, int]) -> None:
    layers, ranks = size
    assert largest(by_cost([1.0] * layers, ranks), [1.0] * layers) == -(-layers // ranks)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_explicit_takes_the_sizes_it_is_given(blocks: list[int]) -> None:
    partition = explicit(blocks, sum(blocks), len(blocks))
    check(partition, sum(blocks), len(blocks))
    assert [end - first for first, end in map(partition.block, range(len(blocks)))] == blocks


@pytest.mark.parametrize("make", [lambda: uniform(12, 16), lambda: by_cost([1.0] * 12, 16)])
def test_more_ranks_than_layers_is_an_error_with_numbers(make: object) -> None:
    with pytest.raises(UsageError, match="12 layers cannot be shared by 16 ranks; use at most 12 ranks"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("blocks", "layers", "ranks"), [([3, 4], 8, 2), ([4, 4], 8, 3), ([8, 0], 8, 2), ([9, -1], 8, 2), ([], 8, 2)]
)
def test_sizes_that_do_not_fit_are_an_error_with_numbers(blocks: list[int], layers: int, ranks: int) -> None:
    with pytest.raises(UsageError, match=f"{ranks} ranks and {layers} layers need"):
        explicit(blocks, layers, ranks)
