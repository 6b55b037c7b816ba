"""Finds what traced code has changed of objects that were there before.

A block's walk is repeated by what is there before the trace. So a change may be no part of a block, and the same when
each of them is called: an object that a model reaches by a global name, as transformers keep there for whom a forward
collects its outputs, which then holds numbers and texts, or lists and dictionaries of these.
"""

from __future__ import annotations

from itertools import islice
from operator import attrgetter
from types import NoneType
from typing import Any

from fsdp_compiled.torch_private.dynamo import (
    AttributeMutationExisting,
    AttributeMutationNew,
    ConstantVariable,
    ConstDictVariable,
    ListVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
    ValueMutationExisting,
    ValueMutationNew,
    is_from_global_source,
)

is_modified = attrgetter("is_modified")
NEW = (AttributeMutationNew, ValueMutationNew)


class Changed(Exception):
    """What cannot be compared."""


class Objects:
    """Those that a trace has come to. There are as many tensors as parameters, and as many modules as blocks: each of
    them is looked at once."""

    def __init__(self, effects: Any) -> None:
        """``effects``: Dynamo's record of what code changes, which another one may take the place of."""
        self.effects = effects
        self.values: dict[Any, Any] = {}  # what was in a place before the trace, of those that were asked for
        self._table = effects.id_to_variable  # to which it adds
        self._seen = 0
        self._doubtful: list[Any] = []
        self._plain: list[Any] = []  # of lists and dictionaries: what says whether each was changed

    def changes(self) -> tuple[Any, ...]:
        """What was there before the trace and is another now, so that it can be compared. Raises `Changed`."""
        effects, found = self.effects, []
        for variable, attributes in effects.store_attr_mutations.items():
            if isinstance(variable.mutation_type, NEW):
                continue
            if type(variable) is not UserDefinedObjectVariable or not is_from_global_source(variable.source):
                raise Changed
            found.append((variable.source.name, *((name, _form(value)) for name, value in attributes.items())))
        if effects.id_to_variable is not self._table or len(self._table) < self._seen:
            self._table, self._seen, self._doubtful, self._plain = effects.id_to_variable, 0, [], []
        for variable in islice(self._table.values(), self._seen, None):
            if (
                type(variable) in (ConstDictVariable, ListVariable)
                and type(variable.mutation_type) is ValueMutationExisting
            ):
                self._plain.append(variable.mutation_type)
            elif not _is_seen_above(variable):
                self._doubtful.append(variable)
        self._seen = len(self._table)
        if any(map(is_modified, self._plain)):
            raise Changed
        for variable in self._doubtful:
            kind = type(variable.mutation_type)
            if kind is NoneType or issubclass(kind, NEW):
                continue
            above = variable in effects.store_attr_mutations and getattr(variable, "_base_vt", None) is None
            if not above and effects.is_modified(variable):
                raise Changed
        return tuple(found)


def _is_seen_above(variable: Any) -> bool:
    """Whether what is put into it is among the attributes above, and nothing else can change of it; or it is new."""
    kind = type(variable.mutation_type)
    # (Dynamo answers isinstance by a function of its own.)
    if kind is AttributeMutationExisting and issubclass(type(variable), UserDefinedObjectVariable):
        module = issubclass(type(variable), UnspecializedNNModuleVariable)
        return module and getattr(variable, "_base_vt", None) is None
    return issubclass(kind, AttributeMutationExisting | AttributeMutationNew | ValueMutationNew)


def _form(variable: Any) -> Any:
    """All that code can read of it."""
    if type(variable) is ConstantVariable:
        return type(variable.value), repr(variable.value)
    if type(variable) is TupleVariable or (type(variable) is ListVariable and isinstance(variable.mutation_type, NEW)):
        return type(variable), *map(_form, variable.items)
    if type(variable) is ConstDictVariable and isinstance(variable.mutation_type, NEW):
        return variable.python_type(), *((_form(key.vt), _form(value)) for key, value in variable.items.items())
    raise Changed
