"""Names and keys that a trace looked up and did not find: a program relies on their being absent.

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
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import types
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fsdp_compiled.capture.source_lines import is_users
from fsdp_compiled.torch_private.names import TABLE, find, replaced

BUILTINS = frozenset(vars(builtins))
OF_MODULES = re.compile(
    r"_hooks\w*$|\._(parameters|buffers|modules)$|\['_(parameters|buffers|modules)'\]$"
)  # in Dynamo's names
IMMUTABLE = 1 << 8  # the flag of a class that gets no new names: CPython's Py_TPFLAGS_IMMUTABLETYPE
TABLES = frozenset({"__dict__", "vars", "dir"})  # these read the names of an object
OBSERVED, KEY, ATTRIBUTE = TABLE["failed lookups"].names


def failed_lookups(found: set[str]) -> AbstractContextManager[None]:
    """Inside, notes in ``found`` which kinds of lookup failed in this thread's trace: "key", "attribute"."""
    kinds = {"key": find(KEY), "attribute": find(ATTRIBUTE)}

    def noted(make: Any, self: Any, *args: Any, **named: Any) -> None:
        found.update(kind for kind, error in kinds.items() if isinstance(self, error))
        make(self, *args, **named)

    return replaced("failed lookups", (f"{OBSERVED}.__init__", noted))


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


def is_empty(name: str, value: Any) -> bool:
    """Whether the value is an empty dictionary. A module's own dictionaries do not count: they have other guards."""
    return isinstance(value, dict) and not value and OF_MODULES.search(name) is None


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


Space = tuple[str, dict[str, Any], frozenset[str]]  # what it is called, its names, the names that must stay absent


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
