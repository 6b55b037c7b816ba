"""What an optimizer's functions read outside of it: globals of their modules, and what they close over.

    SCALE = 0.1                  a global                          def step(self): ... SCALE ...
    settings.decay = 0.1         an entry of a module or class     def step(self): ... settings.decay ...
    def make(scale): ...         a cell of a closure               class Mine: def step(self): ... scale ...

Rules keep what these were when they were traced. They are found in the code of the class's functions and of those that
these call, as far as they are of the same package; PyTorch's own are not looked at. All are compared at every step.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp_compiled.optim.comparable import DEPTH, Same, inside, is_plain, value_of

MISSING = object()
KNOWN = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)  # equal to themselves alone


class Outside:
    """What a class's functions read, as it is when this is made."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._read = _Reader(kind)
        self._then = self._values()
        self._quickly()

    def unchanged(self) -> bool:
        """Whether a look at the objects themselves finds nothing new; False does not yet mean a change."""
        try:
            return (
                all(holder.get(name, MISSING) is value for holder, name, value in self._names)
                and all(cell.cell_contents is value for cell, value in self._cells)
                and all(value_of(value, DEPTH) == copy for value, copy in self._inside)
            )
        except Exception:  # an empty cell; values that cannot be compared
            return False

    def changed(self) -> list[str]:
        """The names of what is another now."""
        now = self._values()
        found = [name for name in self._then if self._then[name] != now[name]]
        if not found:
            self._then = now
            self._quickly()
        return found

    @property
    def key(self) -> tuple[Any, ...] | None:
        """What a verdict on the class depends on; None where that cannot be said."""
        found: list[Any] = []
        for name, value in self._then.items():
            if not is_plain(value) and not isinstance(value, Same):
                return None
            if isinstance(value, Same) and not isinstance(value.of, KNOWN):
                return None
            found.append((name, value.of if isinstance(value, Same) else repr(value)))
        return tuple(found)

    def _values(self) -> dict[str, Any]:
        """What can be compared, by name."""
        names = {label: holder.get(name, MISSING) for label, (holder, name) in self._read.names.items()}
        names |= {label: _content(cell) for label, cell in self._read.cells.items()}
        return {label: self._value(value) for label, value in names.items()}

    def _value(self, value: Any) -> Any:
        own = is_plain(value) or isinstance(value, dict | list | tuple) or self._read.is_own(type(value))
        return value_of(value, DEPTH if own or hasattr(value, "_version") else 0)

    def _quickly(self) -> None:
        """Prepares what `unchanged` compares."""
        self._names = [(holder, name, holder.get(name, MISSING)) for holder, name in self._read.names.values()]
        self._cells = [(cell, _content(cell)) for cell in self._read.cells.values()]
        held = [value for _, _, value in self._names] + [value for _, value in self._cells]
        compared = [(value, self._value(value)) for value in held if not is_plain(value)]
        self._inside = [(value, copy) for value, copy in compared if type(copy) is not Same]


def notes_read(kind: type[Optimizer], parameters: Iterable[torch.Tensor]) -> list[str]:
    """Attributes that the user put on parameters (``p.scale = 0.5``), and that the class's code may read."""
    noted = dict.fromkeys(name for parameter in parameters for name in vars(parameter))
    words = _Reader(kind).words if noted else set()
    return [name for name in noted if name in words]


class _Reader:
    """The names and cells that functions of a class read, and those of functions that they name."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self.names: dict[str, tuple[Mapping[str, Any], str]] = {}  # where they are, by what they are called
        self.cells: dict[str, types.CellType] = {}
        self.words: set[str] = set()  # that could name an attribute
        bases = kind.__mro__[: kind.__mro__.index(Optimizer)]
        self._roots = {base.__module__.split(".")[0] for base in bases} - {"torch"}
        self._seen: set[int] = set()
        for base in bases:
            self._of_class(base)

    def is_own(self, value: Any) -> bool:
        """Whether it is of the class's package."""
        return str(getattr(value, "__module__", "") or getattr(value, "__name__", "")).split(".")[0] in self._roots

    def _of_class(self, kind: type) -> None:
        if id(kind) not in self._seen and self.is_own(kind):
            self._seen.add(id(kind))
            for value in list(kind.__dict__.values()):
                for function in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset"))):
                    self._follow(function)

    def _follow(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._of_function(inside(value))
        elif isinstance(value, type):
            self._of_class(value)

    def _of_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        own = self.is_own(function) and function.__globals__.get("__name__", "").split(".")[0] in self._roots
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            content = _content(cell)
            if own and name != "__class__":
                self.cells[f"{name} of {function.__qualname__}"] = cell
            self._follow(content)
        names = list(_names(function.__code__)) if own else []
        self.words.update(names, _texts(function.__code__) if own else ())
        for name in names:
            if name in function.__globals__:
                self._note(function.__globals__, name, names)

    def _note(self, holder: Mapping[str, Any], name: str, names: list[str]) -> None:
        value = holder[name]
        if isinstance(value, types.ModuleType) and not self.is_own(value):
            return
        self.names[f"{holder.get('__name__', '')}.{name}"] = (holder, name)
        self._follow(value)
        if isinstance(value, types.ModuleType) and self.is_own(value):
            for one in names:
                if one in value.__dict__ and f"{value.__name__}.{one}" not in self.names:
                    self._note(value.__dict__, one, names)
        elif isinstance(value, type) and self.is_own(value):
            for one in names:
                if one in value.__dict__ and not isinstance(value.__dict__[one], types.FunctionType):
                    self.names[f"{value.__qualname__}.{one}"] = (value.__dict__, one)


def _names(code: types.CodeType) -> Iterator[str]:
    """What code, and code inside it, looks up by name."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _texts(code: types.CodeType) -> Iterator[str]:
    """The words that it holds as text, such as the name in ``getattr(p, "scale", 1)``."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _texts(inner)
        elif isinstance(inner, str) and inner.isidentifier():
            yield inner


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return MISSING
