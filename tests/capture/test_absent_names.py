"""What a trace did not find appears later: what eager PyTorch computes from then on."""

from __future__ import annotations

import builtins
import contextlib
import os
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import CaptureError, Policy, compile_sharded, fully_shard
from fsdp_compiled.capture.looked_up_names import AbsentNames
from tests.chosen import needs_torch

TABLE: dict[str, float] = {}
ORDERED: OrderedDict[str, float] = OrderedDict()
NAME = "FSDP_COMPILED_TEST_FACTOR"


class Holder:
    factor: float


class OfClass:
    factor: float


class Own:
    def __init__(self) -> None:
        self.inside: dict[str, float] = {}

    def __getitem__(self, key: str) -> float:
        return self.inside[key]


HOLDER, OWN, OF_CLASS = Holder(), Own(), OfClass()
MODULE: Any = types.ModuleType("module")


def caught_key() -> float:
    try:
        return TABLE["factor"]
    except KeyError:
        return 1.0


def suppressed() -> float:
    found = 1.0
    with contextlib.suppress(LookupError):
        found = TABLE["factor"]
    return found


def caught_attribute() -> float:
    try:
        return HOLDER.factor
    except AttributeError:
        return 1.0


def of_class() -> float:
    try:
        return OF_CLASS.factor
    except AttributeError:
        return 1.0


def of_class_by_name() -> float:
    try:
        return float(getattr(OfClass, "factor"))  # noqa: B009 # a name that is a constant of the code
    except AttributeError:
        return 1.0


def of_module() -> float:
    try:
        return float(MODULE.factor)
    except AttributeError:
        return 1.0


def own_mapping() -> float:
    try:
        return OWN["factor"]
    except KeyError:
        return 1.0


def anything() -> float:
    try:
        return TABLE["factor"]
    except Exception:
        return 1.0


def environment() -> float:
    return float(os.environ.get(NAME, "1"))


def of_getenv() -> float:
    return float(os.getenv(NAME) or 1)


def in_environment() -> float:
    return 2.0 if NAME in os.environ else 1.0


def of_builtin() -> float:
    return float(divmod(7, 7)[0])


def in_a_table_of_names() -> float:
    return float(vars(HOLDER).get("factor", 1.0))


def how_many_names() -> float:
    return 1.0 + len(HOLDER.__dict__)


def any_key() -> float:
    return 2.0 if any(TABLE) else 1.0


def truth_of_a_dictionary() -> float:
    return (1.0, 2.0)[bool(TABLE)]


def truth_of_an_ordered_one() -> float:
    return 2.0 if ORDERED else 1.0


WAYS: dict[Callable[[], float], Callable[[], Any]] = {
    caught_key: lambda: TABLE.update(factor=2.0),
    suppressed: lambda: TABLE.update(factor=2.0),
    anything: lambda: TABLE.update(factor=2.0),
    in_a_table_of_names: lambda: setattr(HOLDER, "factor", 2.0),
    how_many_names: lambda: setattr(HOLDER, "factor", 2.0),
    any_key: lambda: TABLE.update(factor=2.0),
    truth_of_a_dictionary: lambda: TABLE.update(factor=2.0),
    truth_of_an_ordered_one: lambda: ORDERED.update(factor=2.0),
    caught_attribute: lambda: setattr(HOLDER, "factor", 2.0),
    of_class: lambda: setattr(OfClass, "factor", 2.0),
    of_class_by_name: lambda: setattr(OfClass, "factor", 2.0),
    of_module: lambda: setattr(MODULE, "factor", 2.0),
    own_mapping: lambda: OWN.inside.update(factor=2.0),
    environment: lambda: os.environ.update({NAME: "2"}),
    of_getenv: lambda: os.environ.update({NAME: "2"}),
    in_environment: lambda: os.environ.update({NAME: "2"}),
    of_builtin: lambda: globals().update(divmod=lambda *_: (2.0, 0)),
}


class Scaled(nn.Module):
    def __init__(self, factor: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.factor()).square().mean()


def forget() -> None:
    for table in (TABLE, ORDERED, OWN.inside, vars(HOLDER)):
        table.clear()
    os.environ.pop(NAME, None)
    globals().pop("divmod", None)
    vars(MODULE).pop("factor", None)
    if "factor" in vars(OfClass):
        del OfClass.factor


@pytest.fixture(autouse=True)
def nothing_is_there() -> Iterator[None]:
    yield
    forget()


def values(factor: Callable[[], float], face: str, change: Callable[[], Any]) -> list[float]:
    torch.manual_seed(0)
    model, x = Scaled(factor), torch.ones(2, 4)
    call: Any = model
    if face == "fully_shard":
        fully_shard(model)
    elif face == "compile_sharded":
        sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.0), policy=Policy(lower="eager"))
        call = sharded.step
    found = [call(x).item() for _ in range(2)]
    change()
    return [*found, call(x).item()]


@pytest.mark.parametrize("face", ["fully_shard", "compile_sharded"])
@pytest.mark.parametrize("factor", WAYS, ids=lambda one: one.__name__)
def test_it_is_seen(factor: Callable[[], float], face: str) -> None:
    if factor in (how_many_names, truth_of_a_dictionary):
        needs_torch((2, 12), "its Dynamo cannot trace it: refused")
    expected = values(factor, "eager", WAYS[factor])
    forget()
    assert expected[1] != expected[2] and divmod is builtins.divmod
    assert values(factor, face, WAYS[factor]) == pytest.approx(expected, rel=1e-6)


def test_names_that_come_where_nothing_was_looked_up_in_vain_compile_nothing() -> None:
    TABLE["first"] = 1.0
    model = Scaled(lambda: TABLE.get("factor", 1.0))
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), policy=Policy(lower="eager"))
    sharded.step(torch.ones(2, 4))
    TABLE["another"] = 3.0
    HOLDER.factor = 2.0
    sharded.step(torch.ones(2, 4))
    assert sharded.captures == 1


def test_a_setting_that_a_trace_changes_is_refused() -> None:
    model = Scaled(lambda: 2.0 if torch.backends.mkldnn.enabled else 1.0)
    fully_shard(model)
    with pytest.raises(CaptureError, match=r"reads torch.backends.mkldnn.enabled"):
        model(torch.ones(2, 4))


def test_control_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AbsentNames, "changed", lambda *_: None)
    found = values(caught_key, "fully_shard", WAYS[caught_key])
    assert found[2] == found[1]
