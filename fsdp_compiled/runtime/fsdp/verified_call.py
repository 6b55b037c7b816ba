"""Compares calls under `fully_shard` with eager PyTorch: the module's own code, on the same weights, inputs, modes and
random numbers.

    forward     the module's code; then the program; what they return is compared
    backward    the same, with the derivatives that the user's loop gives; the gradients' means over ranks are compared

The eager forward's graph is kept until the first backward that reduces gradients of the module. A difference is an
error on every rank, before forward returns or any gradient is left in ``grad``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_compiled.capture import model_tensors
from fsdp_compiled.capture.captured import Capture
from fsdp_compiled.capture.tensor_parallel import own_part
from fsdp_compiled.distributed.mesh import any_rank
from fsdp_compiled.ir.program import Port
from fsdp_compiled.plan.plan import Division, Slot
from fsdp_compiled.plan.rows import own_rows
from fsdp_compiled.runtime.eager_comparison import (
    TINY,
    ProgramDiffers,
    VerifiedPrograms,
    buffers_off,
    gradient_bound,
    largest,
    off,
    returned_off,
)
from fsdp_compiled.runtime.eager_run import EagerRun, Place
from fsdp_compiled.runtime.fsdp.module_plan import ModulePlan
from fsdp_compiled.runtime.fsdp.module_state import traced
from fsdp_compiled.runtime.fsdp.parameter_group import Entry
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.request import Request
from fsdp_compiled.runtime.rng import default_generator


class VerifiedCalls:
    """Decides which calls of one module are verified, and runs them eagerly. It belongs to one plan of the
    parameters."""

    def __init__(self, made: ModulePlan, module: nn.Module, function: Callable[..., Any]) -> None:
        self.made, self.module, self.function = made, module, function
        self.programs = VerifiedPrograms(made.programs, made.mesh)
        self.label = f"verification of {type(module).__name__}"  # to other ranks
        self._counts: dict[int, int] = {}  # calls so far, by the program's number
        self._places: dict[int, Place] = {
            id(entry.parameter): (buffer.key, slot.name)
            for buffer in made.plan.buffers
            for slot, entry in zip(buffer.slots, made.rows[buffer.key].entries, strict=True)
        }

    def due(self, compiled: Compiled) -> bool:
        """Whether to verify this call of the program. Counts the call. Collective: ranks may run programs for other
        lengths, so a call is verified where it is one of the first of its program on any of them."""
        count = self._counts[compiled.number] = self._counts.get(compiled.number, -1) + 1
        if not any_rank(self.programs.due(count), self.made.mesh):
            return False
        return not any_rank(self.programs.draws_otherwise(compiled), self.made.mesh)

    def run(self, compiled: Compiled, request: Request, args: tuple[Any, ...], named: dict[str, Any]) -> Verified:
        """Runs the module's forward by its own code. Changes nothing. Collective."""
        begun = time.perf_counter()
        changed = self.programs.changed(compiled, self.module)
        made, generator = self.made, default_generator(self.made.plan.device)
        apart = {name: one.gathered() for name, one in made.apart}  # as for the program, by what their class says
        places = self._places | {id(one): ("", name) for name, one in apart.items()}
        run = EagerRun(made.plan, made.mesh, made.lent.shards, lambda one: places.get(id(one)), apart)
        drawn, result, failure = generator.get_state(), None, None
        closed = compiled.capture.guards.closed.tensors.values()
        inputs = [one for one in pytree.tree_leaves((args, named)) if isinstance(one, torch.Tensor)]
        others = [*inputs, *closed, *request.closed.values()]
        args, named = pytree.tree_map(lambda one: one, (args, named))  # new containers, which the code may change
        try:
            with (
                traced(),
                request.modes.entered(),
                torch.set_grad_enabled(compiled.kind == "training"),
                self.registered(apart),
                run.reading(self.module, self.function, others),
            ):
                result = self.function(self.module, *args, **named)
        except Exception as error:
            failure = error
        finally:
            generator.set_state(drawn)
        run.end(
            failure,
            f"{type(self.module).__name__} does not run in eager PyTorch, where {compiled.label} would run as it was "
            f"traced{changed}",
            "Nothing was changed.",
        )
        again = partial(self.made.programs.maker.captured_again, request, made.lent.buffers)
        return Verified(self, compiled, run, result, again, changed, drawn, time.perf_counter() - begun)

    def registered(self, gathered: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Inside, modules hold these in the place of their sharded parameters, whose class the model may ask for."""
        held = [(name, holder) for name, one in self.made.apart for holder in one.entry.holders]
        places = [model_tensors.Place(name, module._parameters, key) for name, (module, key) in held]
        return model_tensors.in_place(places, gathered)


class Verified:
    """One verified call: the eager forward's results, and its backward."""

    def __init__(
        self, owner: VerifiedCalls, compiled: Compiled, run: EagerRun, result: Any,
        again: Callable[[], Capture], changed: str, drawn: torch.Tensor, took: float,
    ) -> None:  # fmt: skip
        self.label = owner.label
        self._owner, self._compiled, self._run, self._changed = owner, compiled, run, changed
        self._result, self._again, self._drawn, self._took = result, again, drawn, took
        lent = owner.made.lent
        self._before = [(one, one.clone()) for one in (*lent.buffers.values(), *lent.constants.values())]
        self._results: list[torch.Tensor | None] = []  # eager results, by the place among the program's results

    def compare(self, found: Any, outputs: Mapping[Port, torch.Tensor], results: Sequence[Port]) -> None:
        """Raises `ProgramDiffers` on every rank where forward returned or left something else, after it restored the
        buffers.

        ``found``: forward's return value; ``outputs``: the tensors in it; ``results``: those that have derivatives.
        Collective.
        """
        programs, plan = self._owner.programs, self._owner.made.plan
        said = returned_off(found, self._result, plan)
        said = said or buffers_off(self._owner.made.lent.buffers, self._run.buffers, plan)
        try:
            programs.agree(said, self._changed, self._compiled, self._again)
        except ProgramDiffers:
            with torch.no_grad():
                for one, value in self._before:
                    one.copy_(value)
            default_generator(plan.device).set_state(self._drawn)
            raise
        programs.alike(self._compiled, self._took)
        mine, theirs = pytree.tree_leaves(found), pytree.tree_leaves(self._result)
        places = {id(one): place for place, one in enumerate(mine) if isinstance(one, torch.Tensor)}
        known = [places.get(id(outputs[port])) for port in results]
        self._results = [None if place is None else own_part(theirs[place]) for place in known]
        self._result, self._before = None, []

    def backward(self, tangents: Sequence[torch.Tensor | None]) -> bool:
        """Runs the eager backward from these derivatives, once. Returns whether it ran. Collective."""
        results, self._results = self._results, []
        given = [
            (one, tangent)
            for one, tangent in zip(results, tangents, strict=False)
            if tangent is not None and one is not None and one.requires_grad
        ]
        complete = all(one is not None for one, tangent in zip(results, tangents, strict=False) if tangent is not None)
        owner, failure = self._owner, None
        if any_rank(not (results and complete and owner.programs.gradients), owner.made.mesh):
            return False
        try:
            if given:
                # A checkpointed part of the model runs again.
                put_back = self._run.put_back(owner.module, owner.function)
                with traced(), owner.registered(self._run.apart), put_back:
                    self._run.backward([one for one, _ in given], [tangent for _, tangent in given])
        except Exception as error:
            failure = error
        what = f"the backward of {self._compiled.label} fails in eager PyTorch"
        self._run.end(failure, what, "No gradient was left.")
        return True

    def compare_gradients(self, found: Mapping[Entry, DTensor]) -> None:
        """Raises `ProgramDiffers` on every rank where these gradients differ from the means of the eager ones.
        Collective."""
        made = self._owner.made
        mine = {made.names[entry]: gradient.to_local() for entry, gradient in found.items()}
        share, least = gradient_bound(made.plan)
        entries = {name: entry for entry, name in made.names.items()}
        others = [
            replace(one.buffer, slots=(Slot(replace(one.entry.leaf, names=(name,)), 0),)) for name, one in made.apart
        ]
        whole = {
            slot.name: (slot.leaf, means[slot.name])
            for buffer, means, _ in self._run.means(made.mesh.tp / made.mesh.world, {}, others)
            for slot in buffer.slots
            if slot.name in means and buffer.division == Division() and not buffer.hooked
            if entries[slot.name].parameter.requires_grad  # it may have been frozen since forward
        }
        most = max((largest(mean) for _, mean in whole.values()), default=0.0)
        said = None
        for name, (leaf, mean) in whole.items():
            first, last = own_rows(leaf, made.plan.shard, made.mesh.shard_rank)
            own = mean.narrow(leaf.shard_dim, first, last - first)
            bound = share * largest(mean) + least * most + TINY
            gradient = mine.get(name, torch.zeros_like(own))
            said = said or off(f"the gradient of {name}", gradient, own, bound, own.isfinite())
        self._owner.programs.agree(said, self._changed, self._compiled, self._again, "the backward of ")
