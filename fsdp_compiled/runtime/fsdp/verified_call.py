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
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.tensor_parallel import own_part
from fsdp_compiled.distributed.mesh import RankError, any_rank
from fsdp_compiled.ir.program import Port
from fsdp_compiled.plan.plan import Division
from fsdp_compiled.plan.rows import own_rows
from fsdp_compiled.runtime.eager_run import EagerRun, Place
from fsdp_compiled.runtime.fsdp.module_plan import ModulePlan
from fsdp_compiled.runtime.fsdp.module_state import traced
from fsdp_compiled.runtime.fsdp.parameter_group import Entry
from fsdp_compiled.runtime.programs.compile import Compiled
from fsdp_compiled.runtime.programs.request import Request
from fsdp_compiled.runtime.rng import default_generator
from fsdp_compiled.runtime.verify import (
    TINY,
    attributes,
    changes,
    differing,
    draws_otherwise,
    first_off,
    gradient_bound,
    gradients_compared,
    is_due,
    largest_of,
    returned_otherwise,
    tell_once,
)

CURE = (
    "If the code changed since it was traced in a way that is not seen, build and shard the model again, or change a "
    "guarded value; Policy(verify=False) turns the comparison off."
)


class VerifiedCalls:
    """Decides which calls of one module are verified, and runs them eagerly. It belongs to one plan of the
    parameters."""

    def __init__(self, made: ModulePlan, module: nn.Module, function: Callable[..., Any]) -> None:
        self.made, self.module = made, module
        self._function = function
        self._counts: dict[int, int] = {}  # calls so far, by the program's number
        self._traced: dict[int, dict[str, Any]] = {}  # modules' plain attributes at its first call, by the same
        self.told: set[str] = set()
        self.places: dict[int, Place] = {
            id(entry.parameter): (buffer.key, slot.name)
            for buffer in made.plan.buffers
            for slot, entry in zip(buffer.slots, made.rows[buffer.key].entries, strict=True)
        }

    def due(self, compiled: Compiled) -> bool:
        """Whether to verify this call of the program. Counts the call. The same on every rank."""
        if draws_otherwise(compiled, self.made.plan, self.made.mesh, self.told):
            return False
        if self.made.extended:
            told = f"{compiled.label} reads weights of classes of their own, so it is not compared."
            tell_once(self.told, self.made.mesh, told)
            return False
        count = self._counts[compiled.number] = self._counts.get(compiled.number, -1) + 1
        return is_due(self.made.plan.policy.verify, count)

    def run(self, compiled: Compiled, request: Request, args: tuple[Any, ...], named: dict[str, Any]) -> Verified:
        """Runs the module's forward by its own code. Changes nothing. Collective."""
        begun = time.perf_counter()
        plain = attributes(self.module)
        changed = changes(self._traced.setdefault(compiled.number, plain), plain)
        made, generator = self.made, default_generator(self.made.plan.device)
        run = EagerRun(made.plan, made.mesh, made.lent.shards, lambda one: self.places.get(id(one)))
        drawn, result, failure = generator.get_state(), None, None
        closed = compiled.capture.guards.closed.tensors.values()
        inputs = [one for one in pytree.tree_leaves((args, named)) if isinstance(one, torch.Tensor)]
        others = [*inputs, *closed, *request.closed.values()]
        args, named = pytree.tree_map(lambda one: one, (args, named))  # new containers, which the code may change
        try:
            with (
                traced(),
                request.modes.entered(),
                torch.enable_grad(),
                run.reading(self.module, self._function, others),
            ):
                result = self._function(self.module, *args, **named)
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
        return Verified(self, compiled, run, result, changed, drawn, time.perf_counter() - begun)


class Verified:
    """One verified call: the eager forward's results, and its backward."""

    def __init__(
        self, owner: VerifiedCalls, compiled: Compiled, run: EagerRun, result: Any, changed: str, drawn: torch.Tensor,
        took: float,
    ) -> None:  # fmt: skip
        self._owner, self._compiled, self._run, self._changed = owner, compiled, run, changed
        self._result, self._drawn, self._took = result, drawn, took
        lent = owner.made.lent
        self._before = [(one, one.clone()) for one in (*lent.buffers.values(), *lent.constants.values())]
        self._results: list[torch.Tensor | None] = []  # eager results, by the place among the program's results

    def compare(self, found: Any, outputs: Mapping[Port, torch.Tensor], results: Sequence[Port]) -> None:
        """Raises `RankError` on every rank where forward returned something else, after it restored the buffers.

        ``found``: forward's return value; ``outputs``: the tensors in it; ``results``: those that have derivatives.
        Collective.
        """
        said = returned_otherwise(found, self._result, self._owner.made.plan)
        try:
            self._agree(said, self._compiled.label)
        except RankError:
            with torch.no_grad():
                for one, value in self._before:
                    one.copy_(value)
            default_generator(self._owner.made.plan.device).set_state(self._drawn)
            raise
        told = f"{self._compiled.label} gave in eager PyTorch what its program gives. That took {self._took:.2f} s."
        tell_once(self._owner.told, self._owner.made.mesh, told, "compared")
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
        made, failure = self._owner.made, None
        if any_rank(not (results and complete and gradients_compared(made.plan.policy)), made.mesh):
            return False
        try:
            if given:
                # A checkpointed part of the model runs again.
                with traced(), self._run.put_back(self._owner.module, self._owner._function):
                    self._run.backward([one for one, _ in given], [tangent for _, tangent in given])
        except Exception as error:
            failure = error
        what = f"the backward of {self._compiled.label} fails in eager PyTorch"
        self._run.end(failure, what, "No gradient was left.")
        return True

    def compare_gradients(self, found: Mapping[Entry, DTensor]) -> None:
        """Raises `RankError` on every rank where these gradients differ from the means of the eager ones.
        Collective."""
        made = self._owner.made
        mine = {made.names[entry]: gradient.to_local() for entry, gradient in found.items()}
        bound, least = gradient_bound(made.plan)
        whole = {
            slot.name: (slot.leaf, means[slot.name])
            for buffer, means in self._run.means(made.mesh.tp / made.mesh.world)
            for slot, entry in zip(buffer.slots, made.rows[buffer.key].entries, strict=True)
            if slot.name in means and buffer.division == Division() and not buffer.hooked
            if entry.parameter.requires_grad  # it may have been frozen since forward
        }
        largest = max((largest_of(mean) for _, mean in whole.values()), default=0.0)
        said = None
        for name, (leaf, mean) in whole.items():
            first, last = own_rows(leaf, made.plan.shard, made.mesh.shard_rank)
            own = mean.narrow(leaf.shard_dim, first, last - first)
            spread = bound * largest_of(mean) + least * largest + TINY
            gradient = mine.get(name, torch.zeros_like(own))
            wrong = ~((gradient - own).abs() <= spread) & own.isfinite()
            said = said or first_off(f"the gradient of {name}", gradient, own, wrong)
        self._agree(said, f"the backward of {self._compiled.label}")

    def _agree(self, said: str | None, label: str) -> None:
        if (told := differing(self._owner.made.mesh, said, self._changed)) is not None:
            raise RankError(f"Policy.verify: in {label}, {told}. {CURE}")
