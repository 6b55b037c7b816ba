"""Guards are built once, and are those that Dynamo builds after it built all of them."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fsdp_compiled.capture import dynamo, settings_once
from fsdp_compiled.capture.guards import Guards, Recorder
from fsdp_compiled.capture.guards_once import FIRST, built_once
from fsdp_compiled.torch_private.dynamo import CheckFunctionManager, config, guard_building
from tests.equal_models import Model, captured

LIKE = ("dropout", "rotary", "checkpointed")


@pytest.fixture(scope="module", autouse=True)
def traced_before() -> None:
    """The first trace of a process asks of more: the module torch, by its name."""
    captured(Model("shared"))


def text_of(guards: Guards) -> list[str]:
    """The tree of what is asked, without addresses, which differ from trace to trace."""
    lines = [line.split("  # ")[0] for line in str(guards._manager).splitlines() if "elapsed" not in line]
    return [re.sub(r"0x[0-9a-f]+|\d{6,}|id=\d+|(?<=dict___)\d+", "-", line) for line in lines]


@contextlib.contextmanager
def built_twice() -> Iterator[None]:
    """As Dynamo does it."""
    yield


@pytest.mark.parametrize("like", LIKE)
def test_the_guards_are_those_of_building_twice(like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(like)
    once = text_of(captured(model).guards)
    monkeypatch.setattr(dynamo, "built_once", built_twice)
    assert once == text_of(captured(model).guards) and len(once) > 50


def test_control_a_guard_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("dropout")
    twice = text_of(captured(model).guards)
    select = Recorder.select

    def fewer(self: Recorder, entries: Any) -> list[bool]:
        kept = select(self, entries)
        last = max(place for place, keep in enumerate(kept) if keep)
        return [keep and place != last for place, keep in enumerate(kept)]

    monkeypatch.setattr(Recorder, "select", fewer)
    assert text_of(captured(model).guards) != twice


def test_each_guard_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: Counter[Any] = Counter()
    build = CheckFunctionManager.build_guards

    def counting(self: Any, guards: Any, *rest: Any, **named: Any) -> Any:
        built.update((guard.name, guard.create_fn_name(), id(guard)) for guard in guards)
        return build(self, guards, *rest, **named)

    monkeypatch.setattr(CheckFunctionManager, "build_guards", counting)
    captured(Model("rotary"))
    assert {key[1] for key, count in built.items() if count > 1} <= set(FIRST)
    assert not any("_hooks" in name and kind.startswith("EMPTY") for name, kind, _ in built)  # which none keeps


def test_what_another_thread_compiles_is_built_and_timed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter of its own reads what guards were derived to; how long they take is measured there alone."""
    derived: list[Any] = []
    timed: list[float] = []
    measure = guard_building.profile_guard_manager
    monkeypatch.setattr(
        guard_building, "profile_guard_manager", lambda *given: timed.append(measure(*given)) or timed[-1]
    )

    def keep(entries: Any) -> list[bool]:
        derived.extend(entry.derived_guard_types for entry in entries)
        return [True] * len(entries)

    def compile_one() -> None:
        function: Callable[..., Any] = torch.compile(
            lambda x: x * 2, backend="eager", options={"guard_filter_fn": keep}
        )
        function(torch.ones(2))

    with built_once():
        other = threading.Thread(target=compile_one)
        other.start()
        other.join()
        assert any(derived) and len(timed) == 1
    captured(Model("shared"))
    assert len(timed) == 1


def test_settings_are_what_they_are_while_a_trace_runs() -> None:
    """Entries of the module, which are found before its function for them is asked; and not after."""
    wanted = {name: getattr(config, name) for name in settings_once.ASKED}
    with settings_once.read_once():
        assert {name: vars(config)[name] for name in settings_once.ASKED} == wanted
        with settings_once.read_once():  # of another thread, that ends first
            pass
        assert vars(config).keys() >= wanted.keys()
    assert not vars(config).keys() & wanted.keys()
    assert {name: getattr(config, name) for name in settings_once.ASKED} == wanted
