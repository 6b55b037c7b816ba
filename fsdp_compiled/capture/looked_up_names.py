"""Names that a trace looked up and Dynamo does not guard: every call checks that they mean the same (see `guards`).

**Names and keys that were not found** (`AbsentNames`): a program relies on their being absent.

    try: scale = table["scale"]                    Dynamo traces the handler, and guards nothing
    except KeyError: scale = 1.0

    wrapped = checkpoint_wrapper(block)            wrapped.scale is block.scale: `__getattr__` looks there
    wrapped.scale = 3.0                            from here on it is the wrapper's own

If a lookup failed in a trace and the code caught the error, no table (for a key) or object (for an attribute) that the
trace looked at may get a new name. Three kinds of things may get none in any case: objects whose class has its own
`__getattr__`; all objects, if the code reads tables of names (``vars(config)``, ``self.__dict__``); and dictionaries
that were empty, since the trace read nothing else of them. Classes and modules get new names all the time, and a new
global may hide a builtin: there, only names that the traced code mentions count. No guard sees reads of environment
variables: if a trace read one, all of them must stay the same.

**Methods and hooks** must be those that the trace went through. Dynamo guards each module's dictionaries of hooks, most
of which are empty and stay empty. It guards neither the methods of classes nor the global hooks of modules.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from fsdp_compiled.capture.global_modes import is_tracker
from fsdp_compiled.capture.source_lines import is_users
from fsdp_compiled.torch_private.names import TABLE, find, replaced

BUILTINS = frozenset(vars(builtins))
OF_MODULES = re.compile(
    r"_hooks\w*$|\._(parameters|buffers|modules)$|\['_(parameters|buffers|modules)'\]$"
)  # in Dynamo's names
IMMUTABLE = 1 << 8  # the flag of a class that gets no new names: CPython's Py_TPFLAGS_IMMUTABLETYPE
TABLES = frozenset({"__dict__", "vars", "dir"})  # these read the names of an object
OBSERVED, KEY, ATTRIBUTE = TABLE["failed lookups"].names
PACKAGE = __name__.split(".")[0]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = (
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
)  # fmt: skip
Space = tuple[str, dict[str, Any], frozenset[str]]  # what it is called, its names, the names that must stay absent


def failed_lookups(found: set[str]) -> AbstractContextManager[None]:
    """Inside, notes in ``found`` which kinds of lookup failed in this thread's trace: "key", "attribute"."""
    kinds = {"key": find(KEY), "attribute": find(ATTRIBUTE)}

    def noted(make: Any, self: Any, *args: Any, **named: Any) -> None:
        found.update(kind for kind, error in kinds.items() if isinstance(self, error))
        make(self, *args, **named)

    return replaced("failed lookups", (f"{OBSERVED}.__init__", noted))


class AbsentNames:
    """``values``: the objects that the trace reached, by Dynamo's name. ``failed``: see `failed_lookups`. ``code``: the
    code that it traced.

    All of the model's modules of these classes count too, since some are in blocks that Dynamo did not walk through.
    """

    def __init__(self, values: Mapping[str, Any], root: nn.Module, failed: set[str], code: set[types.CodeType]) -> None:
        tables = any(not TABLES.isdisjoint(one.co_names) and is_users(one.co_filename) for one in code)
        wanted = _has_names if tables or "attribute" in failed else looks_elsewhere
        found = {id(one): (name, one) for name, one in values.items() if wanted(type(one))}
        if kinds := tuple({type(one) for _, one in found.values()}):
            inside = {f"model.{path}": one for path, one in root.named_modules() if isinstance(one, kinds)}
            found = {id(one): (name, one) for name, one in inside.items()} | found
        held = [(name, vars(one)) for name, one in found.values() if hasattr(one, "__dict__")]
        if "key" in failed:
            # Hooks come and go, and have guards of their own.
            held += [(name, one) for name, one in values.items() if isinstance(one, dict) and "_hooks" not in name]
        self._names = [(name, own, frozenset(own)) for name, own in held]
        self._empty = {name: one for name, one in values.items() if is_empty(name, one)}
        self._tables = list(self._empty.values())
        environment = getattr(os.environ, "_data", None)
        reads = any(one.co_filename == os.__file__ or "getenv" in one.co_names for one in code)
        self._environment = dict(environment) if reads and environment is not None else None
        spaces = [*_builtins(code), *(_classes_and_modules(values, code) if "attribute" in failed else ())]
        self._spaces = [one for one in spaces if one[2]]
        self.read = [*self._names, *self._tables, *self._spaces, *[self._environment] * (self._environment is not None)]

    def changed(self, _scope: object = None) -> str | None:
        """The first object that has a new name now, by Dynamo's name; None where none has."""
        if self._environment is not None and self._environment != os.environ._data:  # type: ignore[attr-defined]
            return "os.environ"
        if any(self._tables):
            return next(name for name, one in self._empty.items() if one)
        for name, own, used in self._spaces:
            if not own.keys().isdisjoint(used):
                return f"{name}.{min(used & own.keys())}"
        for name, own, names in self._names:
            if not own.keys() <= names:
                return name
        return None


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


def is_ours(value: Any) -> bool:
    """Whether it is a function of this package."""
    value = value.func if isinstance(value, functools.partial) else value
    return isinstance(value, types.FunctionType) and value.__module__.split(".")[0] == PACKAGE


def is_empty(name: str, value: Any) -> bool:
    """Whether the value is an empty dictionary. A module's own dictionaries do not count: they have other guards."""
    return isinstance(value, dict) and not value and OF_MODULES.search(name) is None


def looks_elsewhere(kind: type) -> bool:
    """Whether a class has its own `__getattr__`, and its objects have their own names."""
    found = getattr(kind, "__getattr__", None)
    if not isinstance(found, types.FunctionType) or found is nn.Module.__getattr__:
        return False
    return _has_names(kind)


def _has_names(kind: type) -> bool:
    """Whether objects of this class have their own names. Excluded are PyTorch's tables of operators and Python
    modules, which gain names as they are used."""
    known = issubclass(kind, types.ModuleType | types.FunctionType | type) or kind.__module__.startswith("torch")
    return hasattr(kind, "__dict__") and (issubclass(kind, nn.Module) or not known)


def _classes_and_modules(values: Mapping[str, Any], code: set[types.CodeType]) -> list[Space]:
    """The classes and modules that a trace looked at, also as the class of an object, with the names that its code may
    look up there."""
    names = {name for one in code for name in (*one.co_names, *one.co_consts) if isinstance(name, str)}
    spaces: dict[int, tuple[str, Any]] = {}
    for value in values.values():
        if isinstance(value, types.ModuleType):
            spaces[id(value)] = value.__name__, value
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            if not kind.__flags__ & IMMUTABLE:
                spaces[id(kind)] = f"{kind.__module__}.{kind.__qualname__}", kind
    return [(name, vars(one), frozenset(names - vars(one).keys())) for name, one in spaces.values()]


def _builtins(code: set[types.CodeType]) -> list[Space]:
    """For each of the user's modules: its globals, and the builtins that this code reads, which a global may hide."""
    by_file: dict[str, set[str]] = {}
    for one in code:
        if is_users(one.co_filename):
            by_file.setdefault(one.co_filename, set()).update(BUILTINS.intersection(one.co_names))
    modules = (
        {getattr(one, "__dict__", {}).get("__file__"): one for one in list(sys.modules.values())} if by_file else {}
    )
    found = [(modules[file], used) for file, used in by_file.items() if file in modules]
    return [(one.__name__, vars(one), frozenset(used - vars(one).keys())) for one, used in found]


def _code(value: Any) -> types.CodeType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return getattr(value, "__code__", None) if isinstance(value, types.FunctionType) else None
