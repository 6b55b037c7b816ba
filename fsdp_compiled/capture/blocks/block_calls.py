"""A call of a block when Dynamo reaches it: everything about the call that decides what the block's code does.

`changes` finds the changes that traced code made to objects from before the trace. The walk of a block is repeated
according to the state before the trace. So a block itself must make no change, and each block must be called after the
same changes. Only an object that a model reaches by a global name may change: transformers keeps one there, for whom a
forward collects its outputs. It must then hold numbers and texts, or lists, tuples and dictionaries of these.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
import types
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.traceback import get_current_meta

from fsdp_compiled.capture.global_modes import now
from fsdp_compiled.torch_private.dynamo import (
    AttributeMutationNew,
    ChainedSource,
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    ListVariable,
    NNModuleSource,
    Source,
    TensorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
    ValueMutationNew,
    closure_vars,
    is_from_global_source,
    uninteresting_files,
)
from fsdp_compiled.torch_private.modes import transform

NEW = (AttributeMutationNew, ValueMutationNew)


CHANGED = "objects are changed before it is called, or by it"


class Unlike(Exception):
    """Says why Dynamo must walk through a block."""


def changes(effects: Any) -> tuple[Any, ...]:
    """The changes to objects from before the trace, in a form that can be compared. Raises `Unlike` for others.

    ``effects``: Dynamo's record of the changes that code makes."""
    found = []
    for variable, attributes in effects.store_attr_mutations.items():
        if isinstance(variable.mutation_type, NEW):
            continue
        if type(variable) is not UserDefinedObjectVariable or not is_from_global_source(variable.source):
            raise Unlike(CHANGED)
        found.append((variable.source.name, *((name, _form(value)) for name, value in attributes.items())))
    for variable in effects.id_to_variable.values():
        kind = type(variable.mutation_type)
        if kind is NoneType or issubclass(kind, NEW):
            continue
        above = variable in effects.store_attr_mutations and getattr(variable, "_base_vt", None) is None
        if not above and effects.is_modified(variable):
            raise Unlike(CHANGED)
    return tuple(found)


def _form(variable: Any) -> Any:
    """Everything that code can read of the value, in a form that can be compared. Raises `Unlike` for other values."""
    if type(variable) is ConstantVariable:
        return type(variable.value), repr(variable.value)
    if type(variable) is TupleVariable or (type(variable) is ListVariable and isinstance(variable.mutation_type, NEW)):
        return type(variable), *map(_form, variable.items)
    if type(variable) is ConstDictVariable and isinstance(variable.mutation_type, NEW):
        return variable.python_type(), *((_form(key.vt), _form(value)) for key, value in variable.items.items())
    raise Unlike(CHANGED)


PLAIN = (FakeTensor, torch.Tensor, nn.Parameter)
INT = {int}
BLOCK = "___block"  # the called block, in what `BlockCall.evaluate` is given


class BlockCall:
    """Dynamo's call of a block. Raises `Unlike` if something that cannot be compared decides what the code does.

    form    its arguments, so that two calls can be compared: tensors by their layout, numbers, texts
    modes   the modes under which it is called
    changes the changes to objects from before the trace
    stack   the modules that call it
    trace   the user's lines that call it
    """

    def __init__(
        self, variable: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: dict[Any, Any]
    ) -> None:
        """``values``: those from before the trace at the sources that were looked up, in this trace."""
        self.tx, self.output, self.module, self.source = tx, tx.output, variable.value, variable.source
        self._values = values
        self._names = dict(closure_vars())
        self.moved: dict[int, Source] = {}  # this block's sources, by the identity of another block's
        self._scope = {"L": tx.output.local_scope, "G": tx.output.global_scope}
        if self.source is None or tx.output.current_tracer.parent is not None:
            raise Unlike("it is inside of a region of its own")
        if transform() is not None or forward_ad._current_level >= 0:
            raise Unlike("it is called inside of a derivative")
        if self.value(self.source) is not self.module:
            raise Unlike("it is not where it was found")
        self.tensors: list[fx.Node] = []
        self.given: list[Any] = []  # Dynamo's variables for the arguments, and for the elements of these
        self.form = (
            tuple(self._argument(place, one) for place, one in enumerate(args)),
            tuple((name, self._argument(name, one)) for name, one in kwargs.items()),
        )
        self.modes = modes(tx)
        self.stack = dict(tx.nn_module_stack)
        self.path = call_path(variable)
        self.trace = _trace(tx)
        if tx.num_calls.get(self.path):
            raise Unlike("it is called twice")
        self.changes = changes(self.output.side_effects)

    def _argument(self, place: int | str, variable: Any) -> tuple[Any, ...]:
        try:
            return self._form(variable)
        except Unlike as why:
            raise Unlike(f"argument {place} {why}") from None

    def _form(self, variable: Any) -> tuple[Any, ...]:
        self.given.append(variable)
        if isinstance(variable, LazyVariableTracker):
            if not variable.is_realized():
                # If a walk reads it, Dynamo makes a guard for this source alone.
                return ("unread", variable.source.name, id(variable.original_value()))
            variable = variable.realize()
        if type(variable) is TensorVariable:
            if variable in self.output.side_effects.store_attr_mutations:
                raise Unlike("has attributes of its own")
            node = variable.as_proxy().node
            value = node.meta["example_value"]
            if node not in self.tensors:
                self.tensors.append(node)
            place = self.tensors.index(node)
            own = node if node.op == "placeholder" else None
            view = value._is_view(), value.storage_offset(), value.is_inference(), isinstance(value, nn.Parameter)
            return ("tensor", place, own, plain_layout(value), value.is_leaf, *view)
        if type(variable) is ConstantVariable and plain(variable.value):
            return ("constant", type(variable.value), repr(variable.value))  # -0.0 is not 0.0
        if type(variable) is TupleVariable:
            return ("tuple", *(self._form(one) for one in variable.items))
        if isinstance(variable, UserDefinedObjectVariable):
            raise Unlike(
                f"is a {type(variable.value).__name__}, which blocks may change. Give them tensors, numbers and tuples "
                "of these (models of transformers: pass use_cache=False where nothing reads the cache)"
            )
        raise Unlike(f"is a {variable.python_type_name()}, and no tensor, number or tuple of these")

    def value(self, source: Source) -> Any:
        """The object at this source before the trace."""
        try:
            return source.get_value(self._scope, self._names, self._values)
        except Exception as error:
            raise Unlike(f"{source.name} cannot be read: {error}") from error

    def evaluate(self, code: types.CodeType) -> Any:
        """The value of an expression that reads sources. In it, the block is the local named `BLOCK`."""
        scope = {**self._names, "L": {**self._scope["L"], BLOCK: self.module}, "G": self._scope["G"]}
        try:
            return eval(code, scope)
        except Exception as error:
            raise Unlike(f"what is read of it cannot be: {error}") from error


def call_path(variable: Any) -> str:
    """The path of the called module, as `nn_module_stack` has it."""
    outside, inner, last = variable.get_nn_module_stack_source().name.rpartition("._modules[")
    return _path(outside) + _path(inner + last)


@functools.lru_cache
def _path(name: str) -> str:
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)


def moved(source: Source, one: Source, other: Source, known: dict[int, Source]) -> Source:
    """The source of the same place in block ``other``; the source itself if it is outside of block ``one``.
    ``known``: the sources found so far."""
    if (found := known.get(id(source))) is None:
        found = known[id(source)] = _moved(source, one, other, known)
    return found


def _moved(source: Source, one: Source, other: Source, known: dict[int, Source]) -> Source:
    if source.name == one.name:
        if isinstance(source, NNModuleSource):
            return dataclasses.replace(source, base=bare(other))  # type: ignore[call-arg]
        return dataclasses.replace(bare(other))  # type: ignore[type-var]
    if not isinstance(source, ChainedSource):
        return source
    base = moved(source.base, one, other, known)
    if base is source.base:
        return source
    return dataclasses.replace(source, base=base)  # type: ignore[type-var]


def bare(source: Source) -> Source:
    """The source without the wrappers that only say that a module is there; it has the same name."""
    while isinstance(source, NNModuleSource):
        source = source.base
    return source


def plain(value: Any) -> bool:
    """Whether the value's text (``repr``) describes it completely."""
    if isinstance(value, tuple | list):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def plain_layout(value: Any) -> tuple[Any, ...]:
    """`layout_of`, which describes a plain tensor of fixed sizes completely. Raises `Unlike` for any other value."""
    kind = type(value)
    if kind not in PLAIN or value.layout != torch.strided:
        raise Unlike("its values are not plain tensors of fixed sizes")
    shape, strides = tuple(value.shape), value.stride()
    if not {*map(type, shape), *map(type, strides)} <= INT:
        raise Unlike("its values are not plain tensors of fixed sizes")
    device = value.fake_device if kind is FakeTensor else value.device
    return (
        kind, value.layout, shape, strides, value.dtype, device, value.requires_grad, value.is_conj(), value.is_neg(),
    )  # fmt: skip


def modes(tx: Any) -> tuple[Any, ...]:
    """The modes around a call. Raises `Unlike` if there is an annotation or another mode."""
    state = tx.symbolic_torch_function_state
    if get_current_meta():
        raise Unlike("its calls are annotated")
    if len(state.mode_stack):
        raise Unlike("it is called under a mode")
    return (
        now(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled(),
        *map(torch.get_autocast_dtype, ("cpu", "cuda")),  # which code may read where autocast is off, too
        state.torch_function_subclass_enabled, state.torch_function_mode_enabled,
    )  # fmt: skip


def _trace(tx: Any) -> str:
    """The user's lines that lead to a call, as Dynamo records them."""
    frames = []
    while tx is not None:
        frames.append(tx)
        tx = getattr(tx, "parent", None)
    key = tuple((one.f_code, one.lineno, one.current_instruction.positions) for one in frames)
    if key not in _texts:  # a list of blocks is called in few places
        _texts.clear()
        users = [one.frame_summary() for one in reversed(frames) if not one.is_co_filename_from_nn_modules()]
        left_out = uninteresting_files()
        lines = traceback.StackSummary.from_list([one for one in users if one.filename not in left_out])
        _texts[key] = "".join(lines.format())
    return _texts[key]


_texts: dict[tuple[Any, ...], str] = {}  # the newest
