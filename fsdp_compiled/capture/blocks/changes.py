"""What code has changed, while Dynamo traces it, of what was there before.

A block's walk is repeated by what is there before the trace. So a change may be no part of a block, and the same when
each of them is called: an object that a model reaches by a global name, as transformers keep there for whom a forward
collects its outputs, which then holds numbers and texts, or lists and dictionaries of these.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

from fsdp_compiled.torch_private.dynamo import (
    AttributeMutationExisting,
    AttributeMutationNew,
    ConstantVariable,
    ConstDictVariable,
    ListVariable,
    TensorVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
    ValueMutationNew,
    is_from_global_source,
)

NEW = (AttributeMutationNew, ValueMutationNew)


class Changed(Exception):
    """What cannot be compared."""


def changes(effects: Any) -> tuple[Any, ...]:
    """What was there before the trace and is another now, so that it can be compared. Raises `Changed`."""
    found = []
    for variable, attributes in effects.store_attr_mutations.items():
        if isinstance(variable.mutation_type, NEW):
            continue
        if type(variable) is not UserDefinedObjectVariable or not is_from_global_source(variable.source):
            raise Changed
        found.append((variable.source.name, *((name, _form(value)) for name, value in attributes.items())))
    for variable in effects.id_to_variable.values():
        kind = type(variable.mutation_type)
        if kind is NoneType or issubclass(kind, NEW):
            continue
        if kind is AttributeMutationExisting:
            # There are as many tensors as parameters, and as many modules as blocks: what was put into one is above.
            # (Dynamo answers isinstance by a function of its own.)
            module = issubclass(type(variable), UnspecializedNNModuleVariable)
            module = module and getattr(variable, "_base_vt", None) is None
            if type(variable) is TensorVariable or (module and variable not in effects.store_attr_mutations):
                continue
        above = variable in effects.store_attr_mutations and getattr(variable, "_base_vt", None) is None
        if not above and effects.is_modified(variable):
            raise Changed
    return tuple(found)


def _form(variable: Any) -> Any:
    """All that code can read of it."""
    if type(variable) is ConstantVariable:
        return type(variable.value), repr(variable.value)
    if type(variable) is TupleVariable or (type(variable) is ListVariable and isinstance(variable.mutation_type, NEW)):
        return type(variable), *map(_form, variable.items)
    if type(variable) is ConstDictVariable and isinstance(variable.mutation_type, NEW):
        return variable.user_cls, *((_form(key.vt), _form(value)) for key, value in variable.items.items())
    raise Changed
