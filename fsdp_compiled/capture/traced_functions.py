"""Checks at each call that hooks and methods are those that the trace went through; see `guards`.

Dynamo guards each module's dictionaries of hooks, most of which are empty and stay empty. It guards neither the methods
of classes nor the global hooks of modules.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from fsdp_compiled.capture.global_modes import is_tracker

PACKAGE = __name__.split(".")[0]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = (
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
)  # fmt: skip


def is_ours(value: Any) -> bool:
    """Whether it is a function of this package."""
    value = value.func if isinstance(value, functools.partial) else value
    return isinstance(value, types.FunctionType) and value.__module__.split(".")[0] == PACKAGE


class Hooks:
    """The dictionaries of hooks that were empty, and the global hooks of modules.

    They are checked again after any hook was registered in the process: PyTorch gives each hook the next number.
    """

    def __init__(self, root: nn.Module, empty: Iterable[dict[Any, Any]]) -> None:
        self._root = root
        self._empty = list({id(hooks): hooks for hooks in empty}.values())
        self.own = self._users()
        self._traced = [dict(getattr(root, name)) for name in HOOKS] if self.own else []
        self._global = self._globals()
        self._count = -1

    def same(self) -> bool:
        count = RemovableHandle.next_id
        if count == self._count and not self.own and not self._global:
            return True
        if any(self._empty) or self._users() != self.own or self._globals() != self._global:
            return False
        self._count = count
        return True

    def changed(self, model: nn.Module) -> tuple[str, str] | None:
        if self.same():
            return None
        if self._globals() != self._global:
            return "global hooks", "the global hooks of modules, which are others now"
        for path, module in model.named_modules():
            for kind in HOOKS:
                if any(getattr(module, kind) is hooks for hooks in self._empty if hooks):
                    name = f"model.{path}.{kind[1:]}".replace("..", ".")
                    return name, f"{name}, of which there were none"
        return "model's hooks", "the hooks of the model, which are others now"

    @contextlib.contextmanager
    def as_traced(self, _objective: nn.Module) -> Iterator[None]:
        """Inside, the model has the user's hooks, and then this package's hooks from the time of the trace."""
        now = [(hooks := getattr(self._root, name), dict(hooks)) for name in HOOKS]
        try:
            for (hooks, held), traced in zip(now, self._traced, strict=True):
                hooks.clear()
                hooks |= {key: hook for key, hook in held.items() if not is_ours(hook)}
                hooks |= {key: hook for key, hook in traced.items() if is_ours(hook)}
            yield
        finally:
            for hooks, held in now:
                hooks.clear()
                hooks |= held

    def _users(self) -> list[Any]:
        """The hooks of the model itself, but for this package's and those of trackers."""
        own = (one for name in HOOKS for one in getattr(self._root, name).items())
        return [key for key, hook in own if not is_ours(hook) and not is_tracker(hook)]

    def _globals(self) -> list[Any]:
        places = (getattr(modules, name) for name in GLOBAL_HOOKS)
        return [key for hooks in places for key, hook in hooks.items() if not is_tracker(hook)]


class Methods:
    """The functions of classes that the trace went through, with the class that defines each: ``Block.forward``. Also
    checks that no class has since overridden a name that it inherited: Dynamo checks only the base class."""

    def __init__(self, values: Iterable[Any], code: set[types.CodeType]) -> None:
        values = list(values)
        of = [*map(type, values), *(value for value in values if isinstance(value, type))]
        kinds = {id(kind): kind for one in of for kind in one.__mro__ if kind is not object}
        self._users = [kind for kind in kinds.values() if kind.__module__.split(".")[0] not in ("torch", "builtins")]
        self._names = [frozenset(vars(kind)) for kind in self._users]
        self._sizes = list(map(len, self._names))
        self._found = [
            (kind, name, value)
            for kind in kinds.values()
            for name, value in list(vars(kind).items())
            if _code(value) in code and not is_ours(value)
        ]
        self._functions = [value for _, _, value in self._found]  # which compare by identity

    def same(self) -> bool:
        if [kind.__dict__.get(name) for kind, name, _ in self._found] != self._functions:
            return False
        sizes = list(map(len, map(vars, self._users)))  # no call of Python's: a step counts them
        if sizes == self._sizes:
            return True
        if self._shadowed() is None:  # names that nothing was found by
            self._sizes = sizes
            return True
        return False

    def _shadowed(self) -> tuple[type, str] | None:
        """The first class that has overridden a name that it inherited, and the name."""
        for kind, names in zip(self._users, self._names, strict=True):
            for name in sorted(vars(kind).keys() - names):
                kept = name.startswith("__") and not callable(vars(kind)[name])  # `__slotnames__`, by copy.deepcopy
                if not kept and any(name in vars(base) for base in kind.__mro__[1:]):
                    return kind, name
        return None

    def changed(self) -> tuple[str, str] | None:
        for kind, name, value in self._found:
            if kind.__dict__.get(name) is not value:
                return f"{kind.__name__}.{name}", f"{kind.__name__}.{name}, which is another function now"
        if (found := self._shadowed()) is not None:
            name = f"{found[0].__name__}.{found[1]}"
            return name, f"{name}, which it inherited"
        return None


def _code(value: Any) -> types.CodeType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return getattr(value, "__code__", None) if isinstance(value, types.FunctionType) else None
