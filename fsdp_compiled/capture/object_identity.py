"""An object that a trace reached by two names stays one object.

    STATE.factor                 a global          guards: STATE.factor == 2.0
    self.layers[0].state         the same object   guards: none, in Dynamo; here: self.layers[0].state is STATE

Dynamo recognizes the object when it reaches it by a second name, and does not look at that name any further. If both
names begin at arguments, or both at globals, it makes a guard that they are one object (DUPLICATE_INPUT). If only one
of them does, it makes none, and never for a closure's cell that it knows: it would miss a new object that is put there
later. Here all of them get the guard. Both names may lead to a new object later, as long as it is one object for both.
Written for torch 2.11 to 2.14.

The keys of dictionaries that a trace went through, where Dynamo's guards do not cover everything that it read.

Dynamo's guards check the keys in the order of the dict under an `OrderedDict`. `OrderedDict.move_to_end` changes the
order in which keys are read, but not the dict's, so this file checks the order. For ``list(table)`` and ``[*table]``
Dynamo checks no keys at all (since 2.13; 2.11 checks them). Written for torch 2.11 to 2.14.

Values that are equal and not the same: 0.0 and -0.0; (2, 1) and (2.0, True); keys 1 and 1.0 of a dictionary.

Dynamo checks a value by ``==`` and by its class. This file compares the texts (``repr``) of values for which that is
not enough: zeros, and numbers inside of tuples, sets and keys. If a trace read none of these, there is no check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import re
from collections import OrderedDict
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.source_lines import is_users
from fsdp_compiled.torch_private.dynamo import (
    ClosureSource,
    ConstDictVariable,
    GetItemSource,
    GuardBuilder,
    Source,
    install_guard,
    make_dupe_guard,
)
from fsdp_compiled.torch_private.names import TABLE, replaced


def asked_again() -> contextlib.AbstractContextManager[None]:
    """Inside, if this thread's trace reaches an object by two names, the second gets a guard too."""
    dupe, bind, *_ = TABLE["one object"].names
    return replaced("one object", (dupe, _dupe_guard), (bind, _bind_args))


def _dupe_guard(dupe: Any, source: Source, known: Source | None) -> Any:
    guard = dupe(source, known)
    if guard is not None or known is None or known == source:
        return guard
    return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=known)


def _bind_args(bind: Any, self: Any, parent: Any, *given: Any) -> Any:
    source = self.get_source()
    for place, cell in enumerate(self.fn.__closure__ or ()) if source is not None else ():
        # A method's own class stays; and Dynamo cannot find its cell again for what stands for a process group.
        if self.fn.__code__.co_freevars[place] != "__class__" and cell in parent.output.side_effects:
            of_cell = GetItemSource(ClosureSource(source), place)
            guard = _dupe_guard(make_dupe_guard, of_cell, parent.output.side_effects[cell].source)
            if guard is not None:
                install_guard(of_cell.make_guard(guard))
    return bind(self, parent, *given)


def asked_of_lists() -> contextlib.AbstractContextManager[None]:
    """Inside, if this thread's trace makes a list of a dictionary, the keys get a guard."""
    return replaced("keys of lists", (TABLE["keys of lists"].names[0], _call_method))


def _call_method(call: Any, self: Any, parent: Any, name: str, args: Any, kwargs: Any) -> Any:
    for one in args if name == "extend" else ():
        if isinstance(one, ConstDictVariable) and one.source is not None:
            one.install_dict_keys_match_guard()
            parent.output.guard_on_key_order.add(one.source)
    return call(self, parent, name, args, kwargs)


KEYS = "DICT_KEYS_MATCH"
TEXTS = frozenset({"str", "repr", "format", "ascii", "__str__", "__repr__", "__format__"})
MAKERS = frozenset(map(id, (str, repr, format, ascii)))
FORMATS = frozenset(
    dis.opmap[name] for name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC") if name in dis.opmap
)
BY_EQUALITY = ("CONSTANT_MATCH", "EQUALS_MATCH", "CONSTANT_SUBCLASS_MATCH")
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
OF_A_MODULE = re.compile(r"(.*)(?:\.__dict__\['\w+'\]|\.\w+)$")  # in Dynamo's names


def has_equals(value: Any, guard_type: str) -> bool:
    """Whether this guard also holds for a value that is equal but not the same, or has its keys in another order."""
    if guard_type == KEYS:
        return isinstance(value, OrderedDict) or any(map(_has_number, value))
    if guard_type not in BY_EQUALITY:
        return False
    if isinstance(value, complex):
        return value.real == 0 or value.imag == 0
    return value == 0 if isinstance(value, float) else not isinstance(value, int) and _has_number(value)


def makes_texts(code: set[CodeType], values: Iterable[Any]) -> bool:
    """Whether the user's part of this code, or one of the values that the trace reached, may make a string of an
    object."""
    return not MAKERS.isdisjoint(map(id, values)) or any(
        not TEXTS.isdisjoint(one.co_names)
        or not FORMATS.isdisjoint(one.co_code[::2])
        or any(isinstance(const, str) and "%" in const for const in one.co_consts)
        for one in code
        if is_users(one.co_filename)
    )


def has_text(value: Any) -> bool:
    """Whether it is a dictionary or a dataclass of plain values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _is_written(list(vars(value).values())) if hasattr(value, "__dict__") else False
    if isinstance(value, list | tuple):
        return any(map(has_text, value)) and _is_written(value)
    return isinstance(value, dict) and bool(value) and _is_written(value)


def check_text(name: str, value: Any) -> None:
    """Raises `CaptureError` for a value of which Dynamo of this PyTorch makes another text than Python: before 2.13, an
    ``OrderedDict`` or a ``defaultdict``, which it writes as a plain dictionary."""
    if torch.__version__ < "2.13" and (kind := _subclass_inside(value)) is not None:
        raise CaptureError(
            f"Forward may make a text of {name}, which is or holds a dictionary of class {kind.__qualname__}, and a "
            f"trace of PyTorch {torch.__version__} writes it otherwise than Python.\n"
            "  Cure: use PyTorch 2.13 or later, or a plain dict."
        )


def _subclass_inside(value: Any) -> type | None:
    if isinstance(value, dict):
        return type(value) if type(value) is not dict else _subclass_inside(list(value.values()))
    if isinstance(value, list | tuple):
        return next(filter(None, map(_subclass_inside, value)), None)
    return _subclass_inside(vars(value)) if has_text(value) else None


def _is_written(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_written, value)) and all(map(_is_written, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_written, value))
    return isinstance(value, int | float | complex | str | bytes | None) or has_text(value)


def _has_number(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return any(map(_has_number, value))
    return isinstance(value, int | float | complex)


class EqualValues:
    def __init__(self) -> None:
        self.read: dict[str, tuple[str, str]] = {}  # by Dynamo's name: how it was written, and the code that reads it
        self._all: tuple[CodeType, str] | None = None

    def note(self, name: str, value: Any, guard_type: str) -> None:
        self.read[name] = (repr(list(value)), f"list({name})") if guard_type == KEYS else (repr(value), name)

    def changed(self, scope: dict[str, Any]) -> str | None:
        """The first value whose text changed, by Dynamo's name. Call it only while Dynamo's own guards hold."""
        if self._all is None:  # one expression
            read = self.read.items()
            self.read = {name: one for name, one in read if one[1] != name or not _means_nothing(name, scope)}
            texts = [", ".join(one) for one in zip(*self.read.values(), strict=True)] or ["", ""]
            self._all = compile(f"[{texts[1]}]", "<guard>", "eval"), f"[{texts[0]}]"
        code, expected = self._all
        now = eval(code, scope)
        if repr(now) == expected:
            return None
        both = zip(self.read.items(), now, strict=True)
        return next((name for (name, (was, _)), one in both if repr(one) != was), None)


def _means_nothing(name: str, scope: dict[str, Any]) -> bool:
    """Whether the value needs no check: a size of one of PyTorch's own modules, or a value of a Dropout, such as its
    probability. Most models have many of these."""
    owner = None
    if (found := OF_A_MODULE.match(name)) is not None:
        owner = eval(found[1], scope)
    if not isinstance(owner, nn.Module) or not type(owner).__module__.startswith("torch.nn."):
        return False
    return isinstance(owner, DROPOUTS) or isinstance(eval(name, scope), tuple)
