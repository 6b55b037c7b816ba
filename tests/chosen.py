"""Which cases of a test are in `make test`, where the others show more of the same and are for `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest
import torch

T = TypeVar("T")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def chosen(cases: Iterable[Any], wanted: Collection[Any], ids: Any = None) -> list[Any]:
    """All of them, for `pytest.mark.parametrize`; those that are not ``wanted`` are marked ``exhaustive``."""
    every = list(cases)
    missing = [one for one in wanted if one not in every]
    assert not missing, f"{missing} is none of the cases"
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if one in wanted else pytest.mark.exhaustive,
            id=None if ids is None else ids(one),
        )
        for one in every
    ]


def selected(request: pytest.FixtureRequest, parameter: str, fixture: str) -> list[str]:
    """The values of this parameter in the tests of this run that use the fixture: ranks are asked for no others."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    values = {
        item.callspec.params[parameter]
        for item in items
        if fixture in item.fixturenames and parameter in getattr(getattr(item, "callspec", None), "params", ())
        and item.path == request.path
    }  # fmt: skip
    return sorted(values)


def examples(few: T, many: T) -> T:
    """How many models hypothesis draws, or steps a training takes, or which cases there are; `make test-all` sets the
    variable."""
    return many if os.environ.get("ALL_TESTS") else few


def needs_torch(release: tuple[int, int], why: str) -> None:
    """Leaves the test out on releases before this one, and says why."""
    if release > TORCH:
        pytest.skip(why)
