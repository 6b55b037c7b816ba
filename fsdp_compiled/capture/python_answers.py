"""Answers that a trace got from Python and that Dynamo does not guard. Every call checks that they are still the same.

    if self.first is self.second:               two objects that differ: they must stay two
    mask = table(8)                             a function under `functools.lru_cache`: it must return the same object
    if log.isEnabledFor(logging.DEBUG):         a logger: it must answer the same
    if isinstance(self.part, Kind):             an ABC: no class that the trace reached may be registered with it later
    if sys.getrecursionlimit() > 2000:          the interpreter: it must answer the same

Dynamo answers each of these while it traces, and guards none. It has a guard that two objects are one, but none that
they are two. It traces into functions under `lru_cache`, so that a program would draw a random table at every call. It
ignores a logger's methods. It treats a NumPy number as an array, so code that asks for its class is refused.
Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from fsdp_compiled.capture.refusals import refuse
from fsdp_compiled.torch_private.dynamo import (
    AttrSource,
    ConstantVariable,
    GetItemSource,
    LocalSource,
    VariableTracker,
)
from fsdp_compiled.torch_private.names import TABLE, find, has, on_this_thread, replaced, uses

HANDLERS, CACHED, LOGGER, NUMBER, OBJECT, *COMPARE = TABLE["answers of Python"].names[:7]
ASKED = ("isEnabledFor", "getEffectiveLevel", "hasHandlers")  # of loggers
INTERPRETER = ("getrecursionlimit", "get_int_max_str_digits")  # of `sys`
# The types of objects that Dynamo guards by value, or by address.
GUARDED = (
    int, float, complex, str, bytes, bool, type(None), enum.Enum, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, torch.dtype, torch.device,
)  # fmt: skip
SIGNATURE = ("L['named']", "L['args']", "L['kwargs']", "L['buffers']")


class Answers:
    """The answers that one capture got. ``cached``: the objective's list of results of functions under `lru_cache`."""

    def __init__(self, cached: list[Any]) -> None:
        self.two: dict[str, str] = {}  # the text of a comparison -> the object on its left, by Dynamo's names
        self.compared = 0  # how often objects were compared
        self.calls: dict[str, tuple[Callable[[], Any], Any]] = {}  # the text of a call -> the call, and its answer
        self.cached = cached

    def differ(self, left: Any, right: Any) -> None:
        """Two of Dynamo's variables were compared, and are two objects."""
        sources = left.source, right.source
        if left is right or None in sources:
            return
        if any(isinstance(_value(one), GUARDED) for one in (left, right)):
            return
        first, second = (source.name for source in sources)
        if first != second and not any(given in f"{first} {second}" for given in SIGNATURE):
            self.two[f"{first} is {second}"] = first
            self.compared += 1

    def agree(self, one: Any) -> None:
        """A variable was compared with another one of the same object, which Dynamo guards."""
        source = one.source
        if source is not None and not source.name.startswith(SIGNATURE) and not isinstance(_value(one), GUARDED):
            self.compared += 1

    def of(self, values: Collection[Any], code: Collection[types.CodeType]) -> Asked:
        """The answers that a program relies on. ``values``: the objects that the trace reached; ``code``: the code that
        it went through."""
        names = {name for one in code for name in one.co_names}
        calls = self.calls | {
            f"sys.{name}()": (read := getattr(sys, name), read()) for name in INTERPRETER if name in names
        }
        return Asked(self.two, calls, values)


class Asked:
    """What one program relies on."""

    def __init__(
        self, two: Mapping[str, str], calls: Mapping[str, tuple[Callable[[], Any], Any]], values: Collection[Any]
    ) -> None:
        self._two, self._calls = dict(two), dict(calls)
        self._code = compile(f"[{', '.join(self._two)}]", "<guard>", "eval") if two else None
        kinds = {id(one): one for one in values if isinstance(one, abc.ABCMeta)}
        types_ = {id(kind): kind for one in values for kind in (type(one), one) if isinstance(kind, type)}
        self._pairs = [(one, kind) for kind in kinds.values() for one in types_.values()]
        self._token, self._subclasses = abc.get_cache_token(), self._registered()
        self.read = [*self._two, *self._calls, *kinds]

    def _registered(self) -> list[bool]:
        return [issubclass(one, kind) for one, kind in self._pairs]

    def changed(self, scope: dict[str, Any]) -> str | None:
        """The first question whose answer has changed; None if none has."""
        if self._code is not None and any(found := eval(self._code, scope)):
            return list(self._two.values())[found.index(True)]
        for name, (ask, was) in self._calls.items():
            if not _same(ask(), was):
                return name
        if self._pairs and (token := abc.get_cache_token()) != self._token:
            now = self._registered()
            if now != self._subclasses:
                pairs = zip(self._pairs, now, self._subclasses, strict=True)
                one, kind = next(pair for pair, is_, was in pairs if is_ != was)
                return f"issubclass({one.__name__}, {kind.__name__})"
            self._token = token
        return None


def _same(now: Any, was: Any) -> bool:
    return now is was or (type(now) is type(was) and isinstance(was, GUARDED) and bool(now == was))


def _value(variable: Any) -> Any:
    """The object that Dynamo's variable stands for, if it is a constant; else the variable itself."""
    with contextlib.suppress(Exception):
        return variable.as_python_constant()
    return variable


@contextlib.contextmanager
def noted(answers: Answers) -> Iterator[None]:
    """Inside, what this thread's trace asks of Python is noted."""
    if not uses("answers of Python"):
        yield
        return

    def asked(negated: bool, compare: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = compare(tx, args, kwargs)
        differ = _value(found) is negated
        answers.differ(*args) if differ else answers.agree(args[0])
        return found

    def identical(compare: Any, left: Any, right: Any) -> Any:
        found = compare(left, right)
        if found is not None:
            answers.differ(left, right) if _value(found) is False else answers.agree(left)
        return found

    def call_object(call: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """``a == b`` of objects that compare by identity, as torch 2.11 and 2.12 trace it."""
        found = call(self, tx, name, args, kwargs)
        of: Any = type(self.value)
        if name == "__eq__" and of.__eq__ is object.__eq__:
            answers.agree(self) if _value(found) is True else answers.differ(self, args[0])
        return found

    def call_function(call: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        wrapper = self.wrapper_obj
        own = getattr(wrapper, "__module__", None) or ""
        if not hasattr(wrapper, "cache_info") or own.split(".")[0] == "torch":
            return call(self, tx, args, kwargs)
        return _of_cache(answers, tx, wrapper, [*self.self_args(), *args], kwargs)

    def call_logger(call: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name not in ASKED:
            return call(self, tx, name, args, kwargs)
        given = [one.as_python_constant() for one in args]
        ask = partial(getattr(self.value, name), *given)
        answer = ask()
        answers.calls[f"logging.getLogger({self.value.name!r}).{name}({', '.join(map(repr, given))})"] = ask, answer
        return ConstantVariable.create(answer)

    def python_type(kind: Any, self: Any) -> Any:
        if not self.ndim:
            refuse(
                "isinstance, float, int or abs asks a number of NumPy's for its class, which is an array's in a trace. "
                "Make it Python's where it is kept: number.item()."
            )
        return kind(self)

    table = find(HANDLERS)
    handlers = {name: on_this_thread(table[name], partial(asked, name == "is not")) for name in ("is", "is not")}
    methods = (CACHED, call_function), (LOGGER, call_logger), (OBJECT, call_object), (NUMBER, python_type)
    compares = [(name, identical) for name in filter(has, COMPARE)]
    with patch.dict(table, handlers), replaced("answers of Python", *methods, *compares):
        yield


def _of_cache(answers: Answers, tx: Any, wrapper: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function under `lru_cache`, as eager PyTorch does, and returns Dynamo's variable for its result."""
    name = wrapper.__qualname__
    try:
        given = [one.as_python_constant() if one.python_type() is not int else _whole(one) for one in args]
        named = {key: one.as_python_constant() for key, one in kwargs.items()}
    except Exception:
        return refuse(
            f"{name} is under functools.lru_cache, and is called with an object: what it keeps for that object is not "
            "known when a program is traced. Call it with numbers and texts, or keep its result in a buffer."
        )
    ask = partial(wrapper, *given, **named)
    before = torch.get_rng_state()
    value = ask()
    if not torch.equal(before, torch.get_rng_state()):
        return refuse(
            f"{name} is under functools.lru_cache, and draws random numbers, which eager PyTorch does once: a program "
            "would draw them at every call. Call it once before, or keep its result in a buffer."
        )
    said = ", ".join([*map(repr, given), *(f"{key}={one!r}" for key, one in named.items())])
    answers.calls[f"{wrapper.__module__}.{name}({said})"] = ask, value
    if isinstance(value, GUARDED) and not isinstance(value, enum.Enum | type | types.ModuleType | types.FunctionType):
        return VariableTracker.build(tx, value)
    place = next((place for place, one in enumerate(answers.cached) if one is value), len(answers.cached))
    answers.cached[place:] = answers.cached[place:] or [value]
    source = GetItemSource(AttrSource(LocalSource("objective", is_derefed_cell_contents=True), "cached"), place)
    return VariableTracker.build(tx, value, source)


def _whole(one: Any) -> int:
    """The integer as a constant. If it is a size that moves, the program is for this size only from here on."""
    return one.evaluate_expr() if hasattr(one, "evaluate_expr") else one.as_python_constant()
