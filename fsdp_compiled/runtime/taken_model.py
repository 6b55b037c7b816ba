"""The user's model and optimizer after compile_sharded took them over: what may still be done with them.

The model's parameters hold no values (`ShardedParameter`), so calls that would run, save or load it are refused at
once, each with what to call instead. What it says of itself (names, shapes, counts, modes) stays true, its buffers stay
live, and learning-rate schedulers set the rate in the optimizer's groups.

What is changed without a call that could refuse (``module.weight = other``) is noticed at the next call of the
`Sharded`: `TakenModel.check` compares the tables of all modules with what they held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fsdp_compiled.optim.together import members
from fsdp_compiled.runtime.autograd_hooks import backward_hooks, check_hooks
from fsdp_compiled.runtime.sharded_parameter import ShardedParameter
from fsdp_compiled.runtime.taken_optimizer import TakenOptimizer

REBUILD = (
    "Put back what was there; or build the changed model anew, load sharded.full_state_dict() into it, and call "
    "compile_sharded on that."
)
MISSING = object()


def is_taken_over(model: nn.Module) -> bool:
    return any(isinstance(parameter, ShardedParameter) for parameter in model.parameters())


class TakenModel:
    """A model whose parameters live in shards, and its optimizer."""

    _hooked: int  # PyTorch's count of hooks when they were looked at

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self.model = model
        self._call = model.register_forward_pre_hook(_refuse_call)
        for module in filter(is_taken_over, model.modules()):
            module.register_state_dict_pre_hook(_refuse_state_dict)
            module.register_load_state_dict_pre_hook(_refuse_load)
        self._optimizers = [TakenOptimizer(one) for one in members(optimizer)]
        self._remember()

    @contextmanager
    def open(self) -> Iterator[nn.Module]:
        """Inside, the model may be traced: its parameters are ordinary ones, on the meta device."""
        self._call.remove()
        try:
            with holding(self.model, {id(one): ordinary(one) for one in self.model.parameters()}):
                yield self.model
        finally:
            self._call = self.model.register_forward_pre_hook(_refuse_call)

    def check(self) -> None:
        """Raises ``ValueError``, by name, where parameters or hooks are not those that were taken over."""
        if not self._same():
            if (reason := self._changed()) is not None:
                raise ValueError(reason)
            self._remember()  # modules without parameters were exchanged: that is for the guards of programs
        if self._hooked != RemovableHandle.next_id:  # which PyTorch counts up for each hook of the process
            if any(self._hooks):
                check_hooks(self.model)
            self._hooked = RemovableHandle.next_id
        for one in self._optimizers:
            one.check()

    def _remember(self) -> None:
        modules = list(self.model.modules())
        tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._tables, self._empty = [one for one in tables if one], [one for one in tables if not one]
        self._before: list[dict[str, Any]] = [dict(table) for table in self._tables]
        self._parameters = _entries(self.model)
        self._hooks = backward_hooks(self.model)
        self._hooked = -1

    def _same(self) -> bool:
        """Compares tables in C, and in these by identity: a parameter that is asked for its values refuses."""
        try:
            return self._tables == self._before and not any(self._empty)
        except Exception:
            return False

    def _changed(self) -> str | None:
        """Which parameter is not the one that was taken over."""
        now = _entries(self.model)
        for name in {**self._parameters, **now}:
            old, new = self._parameters.get(name, MISSING), now.get(name, MISSING)
            if old is not new:
                how = "added" if old is MISSING else "removed" if new is None or new is MISSING else "replaced"
                return (
                    f"{name} was {how} after compile_sharded, which laid out shards for the parameters that there "
                    f"were. {REBUILD}"
                )
        return None


def _entries(model: nn.Module) -> dict[str, nn.Parameter | None]:
    """What the tables of parameters of a model's modules hold, None too, by name; modules that hold none apart."""
    return {
        f"{path}.{name}".lstrip("."): parameter
        for path, module in model.named_modules(remove_duplicate=False)
        if any(one is not None for one in module._parameters.values())
        for name, parameter in module._parameters.items()
    }


@contextmanager
def holding(model: nn.Module, instead: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Inside, the model holds other tensors in the place of those parameters and buffers, by ``id``."""
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            before = {name: tensor for name, tensor in table.items() if id(tensor) in instead}
            table.update({name: instead[id(tensor)] for name, tensor in before.items()})
            changed.append((table, before))
    try:
        yield
    finally:
        for table, before in changed:
            table.update(before)


def ordinary(parameter: nn.Parameter) -> nn.Parameter:
    """One on the meta device, with what the user noted on it."""
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    found = nn.Parameter(empty, parameter.requires_grad)
    found.__dict__.update(parameter.__dict__)
    return found


def _refuse_call(module: nn.Module, _inputs: Any) -> NoReturn:
    raise RuntimeError(
        f"This {type(module).__name__} was taken over by compile_sharded: its parameters live in shards. Call the "
        "Sharded object instead: sharded(*inputs), sharded.step(*batch), or sharded.full_state_dict() for the weights."
    )


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    if is_taken_over(module):  # not where values are put in for a moment, for the ordinary state_dict
        raise RuntimeError(
            f"This {type(module).__name__} was taken over by compile_sharded: its state_dict would hold no values. "
            "Call sharded.full_state_dict() on every rank: rank 0 gets the ordinary state_dict of the whole model."
        )


def _refuse_load(module: nn.Module, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"This {type(module).__name__} was taken over by compile_sharded: its weights live in shards, and nothing can "
        "be loaded into it. Load weights before compile_sharded, or call sharded.load_full_state_dict(...), "
        "sharded.import_weights(folder) or sharded.load(folder)."
    )
