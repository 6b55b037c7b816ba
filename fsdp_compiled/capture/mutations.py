"""Changes that traced code makes to Python objects that outlive the call. They are undone when the trace is over.

    self.cache["h"] = h          an entry of a dictionary
    self.log.append(loss)        a list that grows
    self.calls += 1              an attribute; so are slots, attributes of classes and names of modules
    count += 1                   a cell, which a closure reads

Dynamo only records such changes while it traces, and makes them when the traced function returns. Between the two, it
knows every object that it is about to change, and `Mutations` saves their contents. Dynamo's guards tell which values
the code read before it wrote them: a value that was only written has no guard.

This is the only file that reads Dynamo's record of side effects (`SideEffects`, and the guards of `TracingContext`).
"""

from __future__ import annotations

import inspect
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.source_lines import words
from fsdp_compiled.torch_private.dynamo import (
    AttributeMutationExisting,
    InstructionTranslator,
    TracingContext,
    ValueMutationExisting,
)

PLAIN = (bool, int, float, complex, str, bytes, type(None))
MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()
FAR = 64  # how many entries more a list has that grew at each of many calls
OWN = ("L['named']", "L['args']", "L['kwargs']", "L['buffers']")  # made for the trace, and gone with it


@dataclass
class Changed:
    """One object that the code changes. ``before``: its old entries; ``kind``: how to write them back."""

    target: Any
    source: str  # as Dynamo writes it
    kind: str  # "list", "deque", "dict", "set", "cell" or "attribute"
    names: tuple[str, ...] = ()  # of the attributes that change
    before: dict[Any, Any] = field(default_factory=dict)

    def now(self) -> dict[Any, Any]:
        """The entries, by index, key or name."""
        target = self.target
        if self.kind in ("list", "deque"):
            return dict(enumerate((list if self.kind == "list" else deque).__iter__(target)))
        if self.kind == "dict":
            return dict(dict.items(target))
        if self.kind == "set":
            return {"": frozenset(target)}
        if self.kind == "cell":
            return _contents(target)
        found = {name: _attribute(target, name) for name in self.names}
        return {name: value for name, value in found.items() if value is not MISSING}

    def undo(self) -> None:
        """Writes the entries back without calling the methods that the user's class defines for writing."""
        target, values = self.target, list(self.before.values())
        if self.kind == "list":
            list.__setitem__(target, slice(None), values)
        elif self.kind == "deque":
            deque.clear(target)
            deque.extend(target, values)
        elif self.kind == "dict":
            base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
            base.clear(target)
            for key, value in self.before.items():
                base.__setitem__(target, key, value)
        elif self.kind == "set":
            set.clear(target)
            set.update(target, values[0])
        elif self.kind == "cell":
            if values:
                target.cell_contents = values[0]
            else:
                del target.cell_contents
        else:
            for name in self.names:
                _set_attribute(target, name, self.before.get(name, MISSING))

    def place(self, key: Any) -> str:
        """The source of one entry."""
        if self.kind == "attribute":
            return f"{self.source}.{key}"
        if self.kind == "cell":
            return f"{self.source}.cell_contents"
        return self.source if self.kind == "set" else f"{self.source}[{key!r}]"


@dataclass(frozen=True)
class Entry:
    """A change in one object: of one attribute, one item, or, if a list grew or shrank, of the whole list."""

    source: str
    name: str  # for people
    old: Any
    new: Any
    read: bool  # before it was written, for all that is known

    @property
    def keeps_tensors(self) -> bool:
        return any(isinstance(leaf, torch.Tensor) or _open(leaf) for leaf in pytree.tree_leaves(self.new))

    def __str__(self) -> str:
        """``calls from 0 to 1``."""
        if isinstance(self.old, PLAIN) and isinstance(self.new, PLAIN):
            return f"{self.name} from {self.old!r} to {self.new!r}"
        return self.name

    @property
    def counts(self) -> bool:
        """Whether a Python integer became another one."""
        return type(self.old) is int and type(self.new) is int


class Mutations:
    """The changes of one trace. It is made inside the backend that Dynamo calls, before Dynamo changes any object."""

    def __init__(self) -> None:
        output = InstructionTranslator.current_tx().output
        effects = output.side_effects
        self.scopes = {"L": output.local_scope, "G": output.global_scope}
        objects = {id(kept): kept for kept in effects.keepalive}
        context = TracingContext.try_get()
        self.guards = {guard.name for guard in context.guards_context.dynamo_guards} if context else set()
        self.objects: list[Changed] = []
        for key, variable in effects.id_to_variable.items():
            existing = isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting)
            if existing and effects.is_modified(variable) and variable.source is not None:
                source = variable.source.name
                if not source.startswith(OWN):
                    self._remember(objects[key], source, tuple(effects.store_attr_mutations.get(variable, {})))

    def name(self, source: str) -> str:
        """The source as the user would write it."""
        return words(source, self.scopes).removeprefix("model.")

    def _remember(self, target: Any, source: str, names: tuple[str, ...]) -> None:
        kinds = {list: "list", deque: "deque", dict: "dict", set: "set", types.CellType: "cell"}
        kind = next((kind for base, kind in kinds.items() if isinstance(target, base)), None)
        if kind == "cell":
            names = ()
        if kind is None and not names:
            raise CaptureError(
                f"Forward draws from {self.name(source)}, a {type(target).__qualname__}, which moves on at each call. "
                "A program would use what it gave when it was traced, at every step: draw outside, and pass it with "
                "the batch."
            )
        for one in (kind, "attribute" if names else None):
            if one is not None:
                changed = Changed(target, source, one, names if one == "attribute" else ())
                changed.before = changed.now()
                self.objects.append(changed)

    def undo(self) -> None:
        """Restores every object to its state before the trace."""
        for changed in reversed(self.objects):
            changed.undo()

    def entries(self) -> list[Entry]:
        """The changes since ``before``, item by item where possible, else object by object."""
        found = []
        for changed in self.objects:
            now = changed.now()
            if changed.kind in ("list", "deque") and len(now) != len(changed.before):
                found.append(self._entry(changed.source, tuple(changed.before.values()), tuple(now.values()), True))
                continue
            for key in {**changed.before, **now}:
                old, new = changed.before.get(key, MISSING), now.get(key, MISSING)
                if _of_torch(changed.target, key, new):
                    continue
                if new is not old and not (type(old) is type(new) and isinstance(old, PLAIN) and old == new):
                    if changed.kind == "set" and old == new:
                        continue
                    found.append(self._entry(changed.place(key), old, new, self._reads(changed, key, old, new)))
        return found

    def _entry(self, source: str, old: Any, new: Any, read: bool) -> Entry:
        return Entry(source, self.name(source), old, new, read)

    def go_far(self) -> None:
        """Extends each list that grew in this call, as if very many calls had been made."""
        for changed in self.objects:
            if changed.kind in ("list", "deque"):
                now = list(changed.now().values())
                added = now[len(changed.before) :]
                if added and all(one is two for one, two in zip(now, changed.before.values(), strict=False)):
                    (list if changed.kind == "list" else deque).extend(changed.target, added * (FAR // len(added)))

    def _reads(self, changed: Changed, key: Any, old: Any, new: Any) -> bool:
        """Whether the code may have read the old value. A value that was only written, or since torch 2.14 only counted
        up, has no guard under any name. Other entries of a dictionary count as read: its length and keys may be."""
        counted = changed.kind == "dict" and type(key) is str and type(old) is type(new) is int
        if old is MISSING or not (counted or changed.kind == "attribute"):
            return True
        name = re.escape(str(key))
        return any(re.search(rf"(\.{name}|\['{name}'\])($|[.\[)])", guard) for guard in self.guards)


def state(
    entries: list[Entry], closed: Mapping[int, str], results: Collection[int]
) -> tuple[dict[str, Any], list[Entry]]:
    """The new values of tensors that the code reads and replaces, by name; and the entries that hold anything else.

    ``closed``: the names of tensors that the trace reads, by identity. ``results``: the identities of its results.
    Raises `CaptureError` if a tensor that was read is replaced by a value that cannot take its place.
    """
    found: dict[str, Any] = {}
    rest = []
    for entry in entries:
        olds, old_spec = pytree.tree_flatten(entry.old)
        news, new_spec = pytree.tree_flatten(entry.new)
        was_read = [isinstance(leaf, torch.Tensor) and id(leaf) in closed for leaf in olds]
        grown = len(news) > len(olds) and all(one is two for one, two in zip(olds, news, strict=False))
        if not any(was_read) or grown:
            rest.append(entry)
            continue
        if old_spec != new_spec:
            raise CaptureError(_no_state(entry, f"a {_kind(entry.old)} by a {_kind(entry.new)}"))
        others = False
        for old, new, read in zip(olds, news, was_read, strict=True):
            if new is old:
                continue
            if not read:
                others = True
            elif id(new) not in results:
                raise CaptureError(_no_state(entry, "a tensor by one that was there before"))
            elif _layout(old) != _layout(new):
                raise CaptureError(_no_state(entry, f"{_layout(old)} by {_layout(new)}"))
            elif found.setdefault(closed[id(old)], new) is not new:
                raise CaptureError(_no_state(entry, "one tensor, which is in several places, by several"))
        if others:
            rest.append(entry)
    return found, rest


def _no_state(entry: Entry, what: str) -> str:
    return (
        f"Forward reads {entry.name} and replaces {what}. What is kept from step to step is a tensor that keeps its "
        "shape, dtype and place: make it a buffer (register_buffer) and replace that, or return it as aux."
    )


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _kind(value: Any) -> str:
    return type(value).__qualname__


def _contents(cell: types.CellType) -> dict[str, Any]:
    try:
        return {"": cell.cell_contents}
    except ValueError:
        return {}


def _of_torch(target: Any, name: str, value: Any) -> bool:
    """Whether a PyTorch module keeps its own parameters in this attribute: ``_flat_weights`` of `nn.LSTM`.

    Its forward writes the attribute whenever parameters were replaced, and a trace replaces them.
    """
    if not isinstance(target, nn.Module) or not isinstance(value, list | tuple):
        return False
    held = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in value]
    theirs = [member for base in type(target).__mro__ if base.__module__.startswith("torch.nn.modules.")
              for member in vars(base).values() if isinstance(member, types.FunctionType)]  # fmt: skip
    named = any(name in function.__code__.co_names for function in theirs)
    return named and all(leaf is None or isinstance(leaf, nn.Parameter) for leaf in held)


def _attribute(target: Any, name: str) -> Any:
    """The object's own attribute, read without calling the methods that its class defines for reading."""
    own = getattr(target, "__dict__", {})
    if name in own:
        return own[name]
    if isinstance(target, type | types.ModuleType) or not hasattr(type(target), name):
        return MISSING
    if not hasattr(inspect.getattr_static(type(target), name, None), "__set__"):
        return MISSING  # an attribute of the class, which an instance shadows
    try:
        return object.__getattribute__(target, name)
    except AttributeError:
        return MISSING


def _set_attribute(target: Any, name: str, value: Any) -> None:
    if isinstance(target, type):
        type.__delattr__(target, name) if value is MISSING else type.__setattr__(target, name, value)
        return
    own = getattr(target, "__dict__", None)
    if own is not None and (name in own or not hasattr(type(target), name)):
        if value is MISSING:
            own.pop(name, None)
        else:
            own[name] = value
    elif value is not MISSING:
        object.__setattr__(target, name, value)
    elif _attribute(target, name) is not MISSING:
        object.__delattr__(target, name)


def _open(leaf: Any) -> bool:
    return not isinstance(leaf, PLAIN) and leaf is not MISSING and hasattr(leaf, "__dict__") and not callable(leaf)


def leaves(entries: list[Entry]) -> Iterator[torch.Tensor]:
    """The tensors in the new values of these entries."""
    for entry in entries:
        yield from (leaf for leaf in pytree.tree_leaves(entry.new) if isinstance(leaf, torch.Tensor))
