"""compile_optimizer: the update of a loop of the user's own as one program, with the clipping before it.

    fully_shard(model)
    optimizer = compile_optimizer(model, torch.optim.AdamW(model.parameters()), max_norm=1.0)
    for tokens, targets in loader:
        loss_fn(model(tokens), targets).backward()
        optimizer.step()                            norm, clip and update, over flat shards
        optimizer.zero_grad()

What comes back is a ``torch.optim.Optimizer`` with the groups, state and hooks of the one that it was given, which
keeps its state in the same memory: schedulers, GradScaler, checkpoints and ``state_dict`` mean what they meant. Where a
step does not fit the program (a parameter without a gradient, parameters of a group that have made different steps),
the optimizer's own code makes it, on the same parameters and state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compiled.ir.program import FACTOR, FOUND, Port, Program
from fsdp_compiled.lower.cuda_graph import Replays, make_device
from fsdp_compiled.optim.hyperparameters import Hyperparameters
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.optim.twin import step_of
from fsdp_compiled.optim.wrapped import check_own_step
from fsdp_compiled.plan.hardware import machine_of
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.loop.flat_gradients import flat_gradient
from fsdp_compiled.runtime.loop.flat_state import FlatState, Part, refusal
from fsdp_compiled.runtime.loop.merged_units import Row
from fsdp_compiled.runtime.loop.module_call import DEFAULT, shared_calls
from fsdp_compiled.runtime.loop.module_plan import units_of
from fsdp_compiled.runtime.loop.module_state import lay_out, states_in
from fsdp_compiled.runtime.loop.parameter_group import ParameterGroup
from fsdp_compiled.runtime.loop.update_program import Update, updated_by

log = logging.getLogger("fsdp_compiled")
# Of the given optimizer's attributes, those that are not this one's: its own are asked for, or mean its own step.
APART = ("param_groups", "state", "defaults", "step", "_step_supports_amp_scaling")


def compile_optimizer(model: nn.Module, optimizer: Optimizer, *, max_norm: float | None = None) -> CompiledOptimizer:
    """An optimizer whose ``step`` is one program over the flat shards of a model that `fully_shard` was called on.

    model
        The module that `fully_shard` was called on last, with all parameters of the optimizer.
    optimizer
        Any ``torch.optim`` optimizer over parameters of that model that can be traced, as those of `compile_sharded`
        are; parameters of one group are laid out together from now on.
    max_norm
        Gradients are scaled down where their global norm is over this, by the formula of
        ``torch.nn.utils.clip_grad_norm_``; `CompiledOptimizer.grad_norm` is the norm before. None: they are left.

    Raises ``ValueError`` or ``NotImplementedError`` for what is not supported, before anything is changed.
    """
    return CompiledOptimizer(model, optimizer, max_norm)


class CompiledOptimizer(Optimizer):
    """What `compile_optimizer` returns: the optimizer that it was given, with another ``step``."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, max_norm: float | None) -> None:
        states = states_in(model)
        if not states:
            raise ValueError("compile_optimizer was given a model that fully_shard was not called on. Call it first.")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; expected a positive number, or None not to clip.")
        if isinstance(optimizer, CompiledOptimizer):
            raise ValueError("compile_optimizer was given an optimizer that it returned. Give it the one inside.")
        check_own_step(optimizer)
        self.optimizer, self.max_norm = optimizer, max_norm
        self.grad_norm: torch.Tensor | None = None  # of the last step, before clipping
        self._model = model
        self._groups = list(dict.fromkeys(state.group for state in states))
        policies = [state.policy for state in states if state.policy is not None]
        given = policies[0] if policies else replace(DEFAULT, cuda_graph="auto")
        self._policy = replace(given, clip=max_norm)
        device = make_device(self._groups[0].mesh.device, given.cuda_graph)
        self._replays = Replays(device, given.cuda_graph)
        # On a device that is not to be waited for, GradScaler's scale and finding are inputs of the program.
        self._step_supports_amp_scaling = device is not None
        self._step = step_of(type(optimizer))
        self._flat = FlatState(optimizer)
        self._made = 0  # programs
        self._versions: list[int] = []
        self._said: set[str] = set()
        self.__dict__.update((name, value) for name, value in vars(optimizer).items() if name not in APART)
        for group in self._groups:  # parameters that took others' places, as load_state_dict(assign=True) puts them
            group.reshard()
            group.follow()
        self._check()
        self._lay_out()

    # What is the optimizer's own.

    param_groups = property(lambda self: self.optimizer.param_groups, lambda self, value: None)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state, lambda self, value: None)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults, lambda self, value: None)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise NotImplementedError(
            "add_param_group is not supported after compile_optimizer, which laid parameters out by groups. Add the "
            "group before, or call compile_optimizer again on optimizer.optimizer."
        )

    def __repr__(self) -> str:
        return f"CompiledOptimizer(max_norm={self.max_norm}) of {self.optimizer!r}"

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        raise TypeError("A CompiledOptimizer cannot be copied: copy optimizer.optimizer, and compile it again.")

    def __reduce__(self) -> NoReturn:
        raise TypeError("A CompiledOptimizer cannot be pickled: save optimizer.state_dict().")

    # A step.

    @Optimizer.profile_hook_step  # type: ignore[misc]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clips and updates; what the closure returned, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            gradients = self._fitting()
            if gradients is None:
                self._as_it_is()
            else:
                self._run(gradients)
        vars(self.optimizer)["_opt_called"] = True  # as schedulers that were given that one ask for it
        return loss

    def _fitting(self) -> dict[Port, torch.Tensor] | None:
        """The flat gradients, by port; None, with the reason logged once, where the program is not for this step."""
        if not all(group.same() for group in self._groups):
            self._not("parameters were given other tensors, which the next call of the model takes over")
            return None
        if not self._hypers.unchanged() and (changed := self._hypers.changed(self._rules)):
            log.info("compile_optimizer: %s changed; the update is traced again.", ", ".join(changed))
            self._versions = []
        if [group.version for group in self._groups] != self._versions:
            with self._calls().refusing():
                self._check()
                self._lay_out()
        gradients: dict[Port, torch.Tensor] = {}
        for part in self._parts:
            if (flat := flat_gradient(part)) is None:
                self._not("a parameter has no gradient, or one that is not cut as the parameter is")
                return None
            gradients[Port("in", "sum", part.buffer.key)] = flat
        if not self._flat.current() and not self._flat.adopt(self._parts):
            self._not("parameters of one group have made different steps")
            return None
        return gradients

    def _not(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.info(
                "compile_optimizer: %s makes this step by its own code: %s.", type(self.optimizer).__name__, reason
            )

    def _as_it_is(self) -> None:
        parameters = [one for group in self.param_groups for one in group["params"]]
        if (found := vars(self).get("found_inf")) is not None:
            if found.item():
                return
            if (scale := vars(self)["grad_scale"]) is not None:
                inverse = scale.double().reciprocal().float()
                for one in parameters:
                    if one.grad is not None:
                        one.grad.mul_(inverse)
        if self.max_norm is not None:
            self._calls().post("update", "as it is")
            try:
                norm: Any = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
                self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            finally:
                self._calls().returned()
        self._step(self.optimizer)

    def _run(self, gradients: dict[Port, torch.Tensor]) -> None:
        self._hypers.write(self._rules)
        scaled = (found := vars(self).get("found_inf")) is not None
        if scaled:  # by a GradScaler, which asks for it
            scale = vars(self)["grad_scale"]
            gradients |= {FOUND: found, FACTOR: torch.ones_like(found) if scale is None else scale}
        update = self._update(scaled)
        update.bind(self._flat.tensors, self._input)
        self.grad_norm = update(gradients)
        self._flat.counted()

    @property
    def program(self) -> Program:
        """What a step runs, for people to read."""
        return self._update(False).program

    def _update(self, scaled: bool) -> Update:
        if scaled not in self._updates:
            self._made += 1
            with self._calls().refusing():
                self._updates[scaled] = Update(
                    self._plan, self._rules, scaled, self._groups[0].mesh, self._calls(), self._replays, self._made
                )
        return self._updates[scaled]

    def _calls(self) -> Any:
        return shared_calls(self._groups[0].mesh)

    def _input(self, port: Port) -> torch.Tensor:
        if port.kind == "hyper":
            return self._hypers.tensors[f"{port.name}.{port.part}"]
        return self._shards[port.name] if port.kind == "shard" else self._flat.tensors[port]

    # The program.

    def _check(self) -> None:
        """The rules. Raises for what is not supported."""
        name = type(self.optimizer).__name__
        known = {id(entry.parameter): entry for group in self._groups for entry in group.entries}
        for number, group in enumerate(self.param_groups):
            for one in group["params"]:
                if id(one) not in known:
                    raise ValueError(
                        f"{name} has a parameter of shape {list(one.shape)} in group {number} that is none of those "
                        "that fully_shard sharded in this model. Give it an optimizer of its own, or make the "
                        "optimizer after fully_shard."
                    )
                if one._local_tensor.is_meta:
                    raise ValueError(
                        "The model is on the meta device: call to_empty and give it values before compile_optimizer."
                    )
        rules = make_rules(self.optimizer)
        for rule in rules:
            reason = "it updates parameters of different shapes in different ways" if rule.variant else refusal(rule)
            if reason is not None:
                raise NotImplementedError(
                    f"{name} is not supported by compile_optimizer: {reason}. Call its own step, which is right "
                    "without it."
                )
        self._rules = rules
        self._updated = {id(one): number for number, group in enumerate(self.param_groups) for one in group["params"]}

    def _lay_out(self) -> None:
        """Flat shards by param group, and the program that updates them."""
        for group in self._groups:
            group.lay_out_by(self._updated)
        lay_out(self._model)
        self._hypers = Hyperparameters(self.optimizer, self._groups[0].mesh.device)
        rows: dict[str, Row] = {}
        plan = _plan(self._model, self._groups, self._policy, rows)
        by_group = {rule.group: rule for rule in self._rules}
        self._parts = [
            Part(buffer, rows[buffer.key], by_group[buffer.group])
            for buffer in plan.buffers
            if buffer.updated and buffer.group is not None
        ]
        self._hypers.write(self._rules)
        self._plan = plan
        self._shards = {part.buffer.key: part.row.tensor for part in self._parts}
        self._replays.close()
        self._updates: dict[bool, Update] = {}  # made when they are asked for; of gradients that are scaled, and not
        self._flat = FlatState(self.optimizer)
        self._versions = [group.version for group in self._groups]


def _plan(model: nn.Module, groups: Sequence[ParameterGroup], policy: Policy, rows: dict[str, Row]) -> Plan:
    mesh = groups[0].mesh
    units = tuple(units_of(model, groups, rows))
    machine = machine_of(mesh.device, mesh.world, policy.bandwidth_gbps, mesh.tp)
    plan = Plan(units, policy, mesh.device, mesh.shard, mesh.replicate, machine, tp=mesh.tp)
    return updated_by(plan, [rows[buffer.key].flats[0].buffer.group for buffer in plan.buffers])
