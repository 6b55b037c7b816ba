"""The user's model and optimizer after compile_sharded took them over: what may still be done with them.

The model's parameters are live (`sharded_parameter`), and so are its buffers: they can be read, written in place, saved
and loaded, and the model can be called (`gathered_call`). Learning-rate schedulers set the rate in the optimizer's
groups.

Some changes are made without a call that could refuse them (``module.weight = other``). The next call of the `Sharded`
notices them: `ManagedModel.check` compares the tables of all modules with what they held.

The user's optimizer only holds hyperparameters such as the rates. Its update is part of the program, and its state
lives in shards. Every step reads the hyperparameters in its groups. Calls that would update, save, load, or change what
is trained raise an error at once, which says what to call instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fsdp_compiled.capture.model_tensors import named_parameters, put_back
from fsdp_compiled.optim.given_optimizer import members
from fsdp_compiled.runtime.autograd_hooks import backward_hooks, check_module_hooks
from fsdp_compiled.runtime.parameters.gathered_call import register
from fsdp_compiled.runtime.parameters.shard_layout import Layout
from fsdp_compiled.runtime.parameters.sharded_operators import gradient_at
from fsdp_compiled.runtime.parameters.sharded_parameter import is_live, show
from fsdp_compiled.runtime.parameters.sharded_tensor import is_sharded

TAKEN = "This optimizer was taken over by compile_sharded: "


def _refuse_state(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{TAKEN}its state lives in sharded.state.optimizer, where it can be read and written in place. Load a state "
        "before compile_sharded, which brings it along."
    )


def _refuse_step(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{TAKEN}sharded.step(*batch) updates the parameters. It stays the place where learning-rate schedulers set "
        "the rate."
    )


_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else schedulers warn that step was replaced


def _refuse_change(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{TAKEN}which parameters its groups hold is laid out in shards. Add parameters and groups before "
        "compile_sharded."
    )


class _NoState(dict[Any, Any]):
    """Raises an error for every access to the optimizer's state."""

    def __repr__(self) -> str:
        return "(in sharded.state.optimizer)"


class _FixedList(list[Any]):
    """A group's parameters, as a read-only list."""


for _name in ("getitem", "setitem", "delitem", "contains", "iter", "len", "eq", "ior", "or", "reduce_ex"):
    setattr(_NoState, f"__{_name}__", _refuse_state)
for _name in ("get", "setdefault", "pop", "popitem", "clear", "update", "keys", "values", "items", "copy"):
    setattr(_NoState, _name, _refuse_state)
for _name in ("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "extend", "insert", "remove", "pop",
              "clear", "sort", "reverse"):  # fmt: skip
    setattr(_FixedList, _name, _refuse_change)


class ManagedOptimizer:
    """Makes the optimizer's methods raise errors, and notices changes that were made without them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        optimizer.state.clear()
        optimizer.state = self._state = _NoState()
        optimizer.step = _refuse_step
        optimizer._opt_called = True  # schedulers look for this, and for the mark above
        optimizer.state_dict = optimizer.load_state_dict = _refuse_state
        optimizer.add_param_group = _refuse_change
        for group in optimizer.param_groups:
            group["params"] = _FixedList(group["params"])
        self._parameters = [group["params"] for group in optimizer.param_groups]

    def check(self) -> None:
        """Raises ``ValueError`` if its state, its ``step`` or its groups' parameters were replaced."""
        now = [group["params"] for group in self._optimizer.param_groups]
        if len(now) != len(self._parameters) or not all(map(is_, now, self._parameters)):
            raise ValueError(
                "The parameters in the optimizer's groups were changed after compile_sharded, by which they are laid "
                "out in shards. Put them back, or choose them before compile_sharded."
            )
        if vars(self._optimizer).get("step") is not _refuse_step:
            raise ValueError(
                "optimizer.step was replaced after compile_sharded, where nothing calls it: sharded.step(*batch) "
                "updates the parameters as the class's own step says. Leave it alone, and call what yours adds before "
                "or after sharded.step."
            )
        if self._optimizer.state is not self._state:
            raise ValueError(
                "optimizer.state was replaced after compile_sharded, where nothing reads it: its state lives in "
                "sharded.state.optimizer, where it can be read and written in place."
            )


REBUILD = (
    "Put back what was there; or build the changed model anew, load sharded.full_state_dict() into it, and call "
    "compile_sharded on that."
)
MISSING = object()
NOTHING = {type(None)}


class ManagedModel:
    """A model whose parameters live in shards, and its optimizer."""

    _hooked: int  # PyTorch's count of hooks when they were looked at

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self._hooks_of_call = register(model, layout)
        _refuse_assigning(model)
        self._flips = layout.flips
        self._shards = list(layout.shards.values())
        self._optimizers = [ManagedOptimizer(one) for one in members(optimizer)]
        self._remember()

    @contextmanager
    def open(self) -> Iterator[nn.Module]:
        """Inside, the model may be traced: tracing puts other tensors in place of its parameters."""
        for hook in self._hooks_of_call:
            hook.remove()
        try:
            yield self.model
        finally:
            self._hooks_of_call = register(self.model, self.layout)

    def check(self) -> None:
        """Raises ``ValueError``, by name, if parameters or hooks are not those that were taken over; ``RuntimeError``
        inside ``gathered()``."""
        if self.layout.gathered is not None:
            raise RuntimeError(
                "Inside of sharded.gathered() the model holds gathered parameters: train, save and load after it. "
                "sharded(*inputs), the model itself and model.generate(...) can be called."
            )
        if self.layout.flips != self._flips:
            self._check_trained()
        if self.layout.whole and not all(map(is_, self.layout.shards.values(), self._shards)):
            show(self.model.parameters())
            self._shards = list(self.layout.shards.values())
        if not self._same():
            if (reason := self._changed()) is not None:
                raise ValueError(reason)
            self._remember()  # only modules without parameters were replaced: programs' guards check these
        if self._hooked != RemovableHandle.next_id:  # PyTorch raises it for each hook of the process
            if any(self._hooks):
                check_module_hooks(self.model)
            self._hooked = RemovableHandle.next_id
        for one in self._optimizers:
            one.check()

    def leave_gradients(self, flats: Mapping[str, torch.Tensor], idle: Collection[str]) -> None:
        """Sets each parameter's ``grad`` from the flat gradients, by buffer key; to None if it has no gradient."""
        for parameter in self.model.parameters():
            place = parameter._sharded_place  # type: ignore[attr-defined]
            flat = flats.get(place.buffer.key)
            none = flat is None or place.name in idle
            parameter.grad = None if none else gradient_at(place, flat)  # type: ignore[arg-type]
        self.layout.gradients_left = False

    def check_gradients(self, call: str) -> None:
        """Raises ``ValueError`` if the user's own backward left a gradient, since this call would not add to it."""
        for name, parameter in named_parameters(self.model):
            gradient = parameter.grad
            own = gradient.local if is_sharded(gradient) else gradient
            if own is not None and bool(own.any()):
                raise ValueError(
                    f"{name}.grad holds a gradient that a backward of your own left, or that you put there, and {call} "
                    "adds to no such gradients: it makes its own. Call model.zero_grad() before; what is to be added, "
                    "add to the loss that compile_sharded is given."
                )
        self.layout.gradients_left = False

    def _remember(self) -> None:
        named = list(self.model.named_modules(remove_duplicate=False))
        modules = dict.fromkeys(module for _, module in named)
        tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._tables, self._sizes = tables, list(map(len, tables))
        self._places, self._names = [one for one in tables for _ in one], [name for one in tables for name in one]
        self._held = [one for table in tables for one in table.values()]
        self._parameters = _entries(named)
        self._hooks = backward_hooks(modules)
        self._hooked = -1

    def _same(self) -> bool:
        """Compares tables in C, and what is in them by identity, as in `ModuleBuffers.look`."""
        now = map(dict.get, self._places, self._names)
        return list(map(len, self._tables)) == self._sizes and all(map(is_, now, self._held))

    def _check_trained(self) -> None:
        """Raises ``ValueError`` if ``requires_grad`` of a parameter differs from what the shards were laid out for."""
        for name, one in named_parameters(self.model):
            if is_live(one) and one.requires_grad != (trained := one._sharded_place.leaf.trainable):  # type: ignore[attr-defined]
                was, now = ("trainable", "frozen") if trained else ("frozen", "trainable")
                raise ValueError(
                    f"requires_grad of {name} was changed after compile_sharded: it was {was}, and is {now}. Shards "
                    f"and optimizer state are laid out by it. Set it back, {name}.requires_grad_({trained}), before "
                    "the step; or load sharded.full_state_dict() into a new model, set requires_grad there, and call "
                    "compile_sharded on that."
                )
        self._flips = self.layout.flips

    def _changed(self) -> str | None:
        """Says which parameter is not the one that was taken over; None if all are."""
        now = _entries(self.model.named_modules(remove_duplicate=False))
        for name in {**self._parameters, **now}:
            old, new = self._parameters.get(name, MISSING), now.get(name, MISSING)
            if old is not new:
                how = "added" if old is MISSING else "removed" if new is None or new is MISSING else "replaced"
                return (
                    f"{name} was {how} after compile_sharded, which laid out shards for the parameters that there "
                    f"were. {REBUILD}"
                )
        return None


def _entries(named: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Parameter | None]:
    """The entries of these modules' parameter tables by name, None too. Modules without parameters are left out."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, module in named
        if (table := module._parameters) and {*map(type, table.values())} != NOTHING
        for name, parameter in table.items()
    }


@contextmanager
def holding(model: nn.Module, instead: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Inside, the model holds the tensors in ``instead`` in place of the parameters and buffers with these ``id``s."""
    with put_back(model):
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                table.update({name: instead[id(one)] for name, one in table.items() if id(one) in instead})
        yield


def _refuse_assigning(model: nn.Module) -> None:
    """Makes ``load_state_dict(assign=True)`` an error for all modules with live parameters inside."""
    for module in model.modules():
        if any(map(is_live, module.parameters())):
            module.register_load_state_dict_pre_hook(_refuse_assigned)


def _refuse_assigned(_module: nn.Module, _state_dict: Any, prefix: str, metadata: Any, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            f"{prefix.rstrip('.') or 'This model'} was taken over by compile_sharded: load_state_dict(assign=True) "
            "would put other tensors in the place of those that are trained. Load without assign, which copies into "
            "them."
        )
