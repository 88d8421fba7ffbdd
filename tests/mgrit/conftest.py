"""Gives back the communicators of the networks that a test has made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _free_communicators() -> Iterator[None]:
    import mgrit_case

    yield
    while mgrit_case.MADE:
        mgrit_case.MADE.pop().comm.free()
