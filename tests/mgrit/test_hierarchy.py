"""Levels and points as pure data, for any N, coarsening and rank count."""

from __future__ import annotations

import reference_mgrit as ref
from hypothesis import given, settings
from hypothesis import strategies as st

from lpnet.config import MGRIT
from lpnet.mgrit import hierarchy

layers_and_settings = st.tuples(
    st.integers(1, 200),
    st.integers(1, 6),
    st.one_of(st.integers(2, 12), st.lists(st.integers(2, 6), min_size=5, max_size=5)),
    st.integers(2, 6),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layers_and_settings)
def test_levels_are_every_cth_point_of_the_level_before(drawn):
    layers, levels, coarsening, min_coarse = drawn
    plan = hierarchy.build(layers, MGRIT(levels=levels, coarsening=coarsening, min_coarse=min_coarse))
    assert [list(grid) for grid in plan.levels] == ref.coarsen(layers, levels, coarsening, min_coarse)
    assert list(plan.levels[0]) == list(range(layers + 1))
    assert len(plan.levels) <= levels
    for coarse in plan.levels[1:]:
        assert len(coarse) >= min_coarse and coarse[0] == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layers_and_settings)
def test_the_reversed_hierarchy_keeps_the_points_and_adds_the_last(drawn):
    layers, levels, coarsening, min_coarse = drawn
    plan = hierarchy.build(layers, MGRIT(levels=levels, coarsening=coarsening, min_coarse=min_coarse))
    backward = plan.reversed()
    assert len(backward.levels) == len(plan.levels)
    for grid, back in zip(plan.levels, backward.levels, strict=True):
        assert set(back) == set(grid) | {layers}
        assert len(set(back)) == len(back)
