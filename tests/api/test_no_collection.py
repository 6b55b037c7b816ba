"""While a program is made no garbage is looked for, and what was made counts as old at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_compiled.runtime.programs import no_collection as collector
from fsdp_compiled.runtime.programs.no_collection import no_collection

MANY = 20_000


class Node:
    """Holds itself, so that the collector alone frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def as_python_has_it() -> Iterator[None]:
    """The tests' own process looks for garbage less often, and freezes what it has imported."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()
    yield
    gc.freeze()
    gc.set_threshold(*before)


def found_by_a_look_after_making() -> int:
    """How many objects the collector frees, of its own accord, soon after a program was made."""
    looks: list[int] = []

    def told(phase: str, info: dict[str, Any]) -> None:
        looks.append(info["collected"] if phase == "stop" else 0)

    gc.callbacks.append(told)
    try:
        with no_collection():
            for _ in range(MANY):
                Node()
        more = [[0] for _ in range(2_000)]
    finally:
        gc.callbacks.remove(told)
    assert more and gc.isenabled()
    return max(looks, default=0)


def test_what_was_made_is_not_looked_through_once_between_two_collections_of_all(as_python_has_it: None) -> None:
    gc.collect()
    assert found_by_a_look_after_making() < 1_000
    assert found_by_a_look_after_making() >= MANY  # the control: the second time, as ever
    assert gc.collect() >= MANY  # the first waited for this
    assert found_by_a_look_after_making() < 1_000
    assert not gc.get_freeze_count()


def test_what_the_user_froze_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: done.append("unfreeze"))
    for frozen, wanted in ((5, []), (0, ["freeze", "unfreeze"])):
        monkeypatch.setattr(collector, "_grown", {"program": -1})
        monkeypatch.setattr(gc, "get_freeze_count", lambda frozen=frozen: frozen)
        with no_collection():
            pass
        assert done == wanted
