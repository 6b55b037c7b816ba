"""What blocks of a stack hold beside weights: an object of each kind that a model's code reads, and how it changes."""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import itertools
import logging
import os
import random
import types
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

WIDTH = 4


class Options:
    """Read by attribute, and through what its attributes hold."""

    shared = 1.0  # of the class

    def __init__(self, factor: float) -> None:
        self.factor, self.table, self.row = factor, {"factor": factor}, [factor]

    @property
    def half(self) -> float:
        return self.factor / 2


class Inheriting(Options):
    """Whose ``shared`` is that of `Options`, until it gets one."""


@dataclass(frozen=True)
class Frozen:
    factor: float


class Count(enum.IntEnum):
    ONE = 1
    TWO = 2


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


@dataclass
class Data:
    factor: float
    inner: dict[str, float] = field(default_factory=dict)


class Pair(NamedTuple):
    factor: float
    tensor: torch.Tensor


class Mode(enum.Enum):
    PLAIN = 1.0
    MORE = 1.25
    LESS = 0.75


class Call:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor


class Scale(nn.Module):
    """A module without weights."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Table(UserDict[str, float]):
    pass


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 1.3


def counting(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A closure over a cell that a second function writes."""
    kept = factor

    def write(other: float) -> None:
        nonlocal kept
        kept = other

    def run(x: torch.Tensor) -> torch.Tensor:
        return x * kept

    run.write = write  # type: ignore[attr-defined]
    return run


# What is not there when a model is traced, and comes later.


class Abstract(abc.ABC):  # noqa: B024 # a class is registered with it, or is not
    pass


def late_attribute(x: torch.Tensor, thing: Any) -> torch.Tensor:
    try:
        return x * thing.late
    except AttributeError:
        return x * 0.8


def late_key(x: torch.Tensor, thing: Any) -> torch.Tensor:
    try:
        return x * thing["late"]
    except KeyError:
        return x * 0.8


def suppressed_key(x: torch.Tensor, thing: Any) -> torch.Tensor:
    with contextlib.suppress(KeyError):
        return x * thing["late"]
    return x * 0.8


def late_item(x: torch.Tensor, thing: Any) -> torch.Tensor:
    try:
        return x * thing[1]
    except IndexError:
        return x * 0.8


class Fallback(dict[str, float]):
    """A mapping that answers for what it lacks."""

    def __missing__(self, name: str) -> float:
        return 0.8


SETTINGS = (f"FSDP_COMPILED_FUZZ_{number}" for number in itertools.count())


def _set(name: str, factor: float) -> None:
    os.environ[name] = str(factor)


def _logger(name: str) -> logging.Logger:
    found = logging.getLogger(f"fsdp_compiled_fuzz.{name}")
    found.setLevel(logging.WARNING)
    return found


@dataclass(frozen=True)
class Kind:
    make: Callable[[float], Any]
    use: Callable[[torch.Tensor, Any], torch.Tensor]
    change: Callable[[Any, float], None] | None = None  # in place; None: it cannot be


def _put(name: str) -> Callable[[Any, float], None]:
    return lambda thing, factor: setattr(thing, name, factor)


def _item(key: Any) -> Callable[[Any, float], None]:
    return lambda thing, factor: thing.__setitem__(key, factor)


def _fill(thing: torch.Tensor, factor: float) -> None:
    thing.fill_(factor)


def _function(factor: float) -> Any:
    return lambda x: x * factor


def _default(factor: float) -> Any:
    return lambda x, by=factor: x * by


def _keyword_default(factor: float) -> Any:
    def run(x: torch.Tensor, *, by: float = factor) -> torch.Tensor:
        return x * by

    return run


def _type(factor: float) -> type:
    return type("Made", (), {"factor": factor})


KINDS: dict[str, Kind] = {
    "number": Kind(lambda f: f, lambda x, o: x * o),
    "integer": Kind(lambda f: int(4 * f), lambda x, o: x * (1 + 0.1 * o)),
    "flag": Kind(lambda f: f > 1, lambda x, o: x.tanh() if o else x),
    "nothing": Kind(lambda f: None if f > 1 else f, lambda x, o: x if o is None else x * o),
    "name": Kind(lambda f: "tanh" if f > 1 else "sigmoid", lambda x, o: getattr(torch, o)(x)),
    "enum": Kind(lambda f: list(Mode)[int(6 * f) % 3], lambda x, o: x * o.value),
    "dtype": Kind(lambda f: torch.float64 if f > 1 else torch.float32, lambda x, o: x.to(o).tanh().float()),
    "slice": Kind(lambda f: slice(0, 1 + int(f * 2)), lambda x, o: x + 0.1 * x[:, o].tanh().sum()),
    "tensor": Kind(lambda f: torch.full((WIDTH,), f), lambda x, o: x * o, lambda o, f: _fill(o, f)),
    "options": Kind(Options, lambda x, o: x * o.factor, _put("factor")),
    "options' table": Kind(Options, lambda x, o: x * o.table["factor"], lambda o, f: o.table.update(factor=f)),
    "options' row": Kind(Options, lambda x, o: x * o.row[0], lambda o, f: o.row.__setitem__(0, f)),
    "options' half": Kind(Options, lambda x, o: x * o.half, _put("factor")),
    "options' class": Kind(Options, lambda x, o: x * (o.shared + o.factor), _put("shared")),
    "options' dict": Kind(Options, lambda x, o: x * vars(o)["factor"], _put("factor")),
    "options by name": Kind(Options, lambda x, o: x * getattr(o, "factor", 2.0),
                            lambda o, f: vars(o).pop("factor", None)),
    "slots": Kind(Slots, lambda x, o: x * o.factor, _put("factor")),
    "dataclass": Kind(lambda f: Data(f, {"a": f}), lambda x, o: x * o.inner["a"], lambda o, f: o.inner.update(a=f)),
    "pair": Kind(lambda f: Pair(f, torch.full((WIDTH,), f)), lambda x, o: x * o.factor * o.tensor),
    "namespace": Kind(lambda f: types.SimpleNamespace(factor=f), lambda x, o: x * o.factor, _put("factor")),
    "dict": Kind(lambda f: {"f": f}, lambda x, o: x * o["f"], _item("f")),
    "dict's length": Kind(lambda f: {"f": f}, lambda x, o: x * len(o), lambda o, f: o.update({str(f): f})),
    "dict's items": Kind(lambda f: {"f": f, "g": 1.0}, lambda x, o: x * sum(o.values()), _item("g")),
    "ordered": Kind(lambda f: OrderedDict(f=f, g=1.0), lambda x, o: x * next(iter(o.values())),
                    lambda o, f: o.move_to_end("f")),
    "defaults": Kind(lambda f: defaultdict(lambda: f), lambda x, o: x * o.get("f", 0.5), _item("f")),
    "user dict": Kind(lambda f: Table(f=f), lambda x, o: x * o["f"], _item("f")),
    "list": Kind(lambda f: [f, {"f": f}], lambda x, o: x * o[0] * o[1]["f"], _item(0)),
    "list's length": Kind(lambda f: [f], lambda x, o: x * len(o), lambda o, f: o.append(f)),
    "deque": Kind(lambda f: deque([f, 1.0]), lambda x, o: x * o[0], lambda o, f: o.appendleft(f)),
    "set": Kind(lambda f: {"a"} if f > 1 else set(), lambda x, o: x.tanh() if "a" in o else x, lambda o, f: o.add("a")),
    "tuple": Kind(lambda f: (f, torch.full((WIDTH,), f)), lambda x, o: x * o[0] * o[1]),
    "function": Kind(_function, lambda x, o: o(x)),
    "default": Kind(_default, lambda x, o: o(x), lambda o, f: setattr(o, "__defaults__", (f,))),
    "keyword's default": Kind(_keyword_default, lambda x, o: o(x), lambda o, f: o.__kwdefaults__.update(by=f)),
    "cell": Kind(counting, lambda x, o: o(x), lambda o, f: o.write(f)),
    "partial": Kind(lambda f: functools.partial(scaled, factor=f), lambda x, o: o(x),
                    lambda o, f: o.keywords.update(factor=f)),
    "method": Kind(lambda f: Call(f).add, lambda x, o: o(x), lambda o, f: setattr(o.__self__, "factor", f)),
    "callable": Kind(Call, lambda x, o: o(x), _put("factor")),
    "module": Kind(Scale, lambda x, o: o(x), _put("factor")),
    "class": Kind(_type, lambda x, o: x * o.factor, _put("factor")),
    "inherited": Kind(Inheriting, lambda x, o: x * o.shared, lambda o, f: setattr(type(o), "shared", f)),
    "frozen": Kind(Frozen, lambda x, o: x * o.factor),
    "count": Kind(lambda f: Count.ONE if f > 1 else Count.TWO, lambda x, o: x * o),
    "zero": Kind(lambda f: 0.0 if f > 1 else -0.0,
                 lambda x, o: x + 0.1 * torch.copysign(torch.ones_like(x), x.abs() * o)),
    "equal numbers": Kind(lambda f: (2,) if f > 1 else (2.0,),
                          lambda x, o: x * (1.1 if isinstance(o[0], float) else 1.0)),
    "list of keys": Kind(lambda f: {round(10 * f): 1}, lambda x, o: x * [*o].pop() / 10,
                         lambda o, f: (o.clear(), o.update({round(10 * f): 1}))),
    "range": Kind(lambda f: range(1 + int(4 * f)), lambda x, o: x * (1 + 0.1 * len(o))),
    "shape": Kind(lambda f: torch.zeros(1 + int(4 * f)), lambda x, o: x * (1 + 0.1 * o.shape[0])),
    "array's shape": Kind(lambda f: numpy.zeros(1 + int(4 * f)), lambda x, o: x * (1 + 0.1 * o.shape[0])),
    "tensor's data": Kind(lambda f: torch.full((WIDTH,), f), lambda x, o: x * o,
                          lambda o, f: setattr(o, "data", torch.full((WIDTH,), f))),
    "list in a closure": Kind(lambda f: (lambda held: (held, lambda x: x * held[0]))([f]), lambda x, o: o[1](x),
                              lambda o, f: o[0].__setitem__(0, f)),
    "late attribute": Kind(lambda f: types.SimpleNamespace(), late_attribute, _put("late")),
    "attribute that is asked for": Kind(lambda f: types.SimpleNamespace(),
                                        lambda x, o: x.tanh() if hasattr(o, "late") else x, _put("late")),
    "late attribute of a class": Kind(lambda f: _type(f)(), late_attribute, lambda o, f: setattr(type(o), "late", f)),
    "late attribute of a module": Kind(lambda f: types.ModuleType("made"), late_attribute, _put("late")),
    "late key": Kind(lambda f: {}, late_key, _item("late")),
    "key that is asked for": Kind(lambda f: {}, lambda x, o: x.tanh() if "late" in o else x, _item("late")),
    "suppressed key": Kind(lambda f: {}, suppressed_key, _item("late")),
    "late item": Kind(lambda f: [f], late_item, lambda o, f: o.append(f)),
    "key of a chain": Kind(lambda f: ChainMap({}, {"late": f}), lambda x, o: x * o["late"], _item("late")),
    "missing key": Kind(lambda f: Fallback(), lambda x, o: x * o["late"], _item("late")),
    "late setting": Kind(lambda f: next(SETTINGS), lambda x, o: x * float(os.environ.get(o, "0.8")), _set),
    "late getenv": Kind(lambda f: next(SETTINGS), lambda x, o: x * float(os.getenv(o, "0.8")), _set),
    "setting that is asked for": Kind(lambda f: next(SETTINGS), lambda x, o: x.tanh() if o in os.environ else x, _set),
    "registered class": Kind(lambda f: _type(f)(), lambda x, o: x.tanh() if isinstance(o, Abstract) else x,
                             lambda o, f: Abstract.register(type(o))),
    "one object": Kind(lambda f: [Options(f), Options(f)], lambda x, o: x.tanh() if o[0] is o[1] else x,
                       lambda o, f: o.__setitem__(1, o[0])),
    "level of a log": Kind(lambda f: _logger(str(f)), lambda x, o: x.tanh() if o.isEnabledFor(logging.INFO) else x,
                           lambda o, f: o.setLevel(logging.INFO if f > 1 else logging.WARNING)),
}  # fmt: skip


# Those of each kind that globals hold.
GLOBALS: dict[str, list[Any]] = {name: [kind.make(1.1), kind.make(0.9)] for name, kind in KINDS.items()}
FIRST: dict[str, Any] = {name: held[0] for name, held in GLOBALS.items()}


def restore() -> None:
    """Globals as they were, for the next case."""
    for name, kind in KINDS.items():
        GLOBALS[name][:] = [kind.make(1.1), kind.make(0.9)]
        FIRST[name] = GLOBALS[name][0]
    Options.shared = 1.0
    if "shared" in vars(Inheriting):
        del Inheriting.shared


def factor(rng: random.Random) -> float:
    return round(rng.uniform(0.5, 1.5), 3)
