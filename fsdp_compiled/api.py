"""compile_sharded: the whole pipeline on one screen.

    model + loss + optimizer -> plan -> capture -> passes -> fusions -> lower -> step

The plan is made here, from the model alone. Capture and all that follows run when the first batch is seen, in
`fsdp_compiled.runtime.sharded`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_compiled.capture.global_modes import outside
from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.capture.side_effects import some
from fsdp_compiled.distributed import network
from fsdp_compiled.distributed.call_log import Calls
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.distributed.mesh import Mesh, Work, agree, lockstep
from fsdp_compiled.optim.given_optimizer import members, numbered, unwrapped
from fsdp_compiled.optim.hyperparameters import Hyperparameters
from fsdp_compiled.optim.optimizer_copy import all_leaves
from fsdp_compiled.optim.rule import Rule, described
from fsdp_compiled.plan.hardware import machine_of
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.plan.units import Choice
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.checked_call import check_place, checked_call
from fsdp_compiled.runtime.local_steps import LocalSteps, exchanges, own_sites, programs_of
from fsdp_compiled.runtime.managed_model import ManagedModel
from fsdp_compiled.runtime.param_step_counts import brought_by
from fsdp_compiled.runtime.programs.no_collection import no_collection
from fsdp_compiled.runtime.programs.program_cache import Programs
from fsdp_compiled.runtime.programs.program_maker import ProgramMaker
from fsdp_compiled.runtime.rng import RandomNumbers
from fsdp_compiled.runtime.shard_model import half_taken, read_scalars, take_over
from fsdp_compiled.runtime.shard_update import ShardUpdate
from fsdp_compiled.runtime.sharded import Sharded
from fsdp_compiled.runtime.state import Copies, State, optimizer_state
from fsdp_compiled.runtime.tensor_parallel.parts import check_policy, check_tensor_parallel
from fsdp_compiled.runtime.tensor_parallel.plan import apply_cuts, find_cuts
from fsdp_compiled.runtime.whole_update import WholeUpdate, first_rank_s, state_by_name

log = logging.getLogger("fsdp_compiled")


@outside
def compile_sharded(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    units: Choice | None = None,
    policy: Policy | None = None,
    init: Callable[[nn.Module], Any] | None = None,
) -> Sharded:
    """Shards a model and its optimizer over the ranks, to be trained by one compiled program.

    model
        Any ``nn.Module``. Its parameters are taken over: their values, rank 0's on every rank, move into shards; the
        objects stay, and are live: DTensors over the shards, or on one rank and under ``"ddp"`` views of the buffers.
        What is written into them in place, the next step reads. On the meta device, ``init`` fills one unit at a time.
    optimizer
        A ``torch.optim`` optimizer over the model's parameters, or one that accelerate or Fabric prepared; a list of
        several, each over its own (Muon for matrices, AdamW for the rest); or None: then `Sharded.step` is refused.
    loss
        ``loss(model, *batch, **batch) -> scalar`` or ``(scalar, aux)``. Left out: what the model returns is the loss,
        or has ``.loss``.
    mesh
        A ``DeviceMesh`` of one axis, which shards, or two, ``("replicate", "shard")``; ``"tp"`` besides, or alone, is
        the axis that ``parallelize_module`` cut the model along. Left out: all ranks that ``torchrun`` started;
        without it, a world of one.
    units
        Which submodules are gathered together: module classes, name patterns (``"layers.*"``) or a callable
        ``(name, module) -> bool``. Left out: each element of the model's repeated block lists, and the rest as root.
    policy
        A `Policy`.
    init
        ``init(module)`` for a meta model, called on each module that owns parameters or buffers. Left out:
        ``module.reset_parameters()``.

    Raises ``ValueError`` for bad input, before anything is changed, and on every rank, `RankError` where ranks
    disagree.
    """
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    filled = init is None and first is not None and not first.is_meta
    # Code of the user's that fills it may leave memory in cycles, which is not to wait.
    with no_collection("model") if filled else nullcontext():
        return _sharded(model, optimizer, loss, mesh, units, policy, init)


def _sharded(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    loss: Callable[..., Any] | None,
    mesh: DeviceMesh | None,
    units: Choice | None,
    policy: Policy | None,
    init: Callable[[nn.Module], Any] | None,
) -> Sharded:
    failure: Exception | None = None
    text, checked = "", None
    own: Optimizer | None = None
    try:
        own = unwrapped(optimizer)
        checked = checked_call(model, own, loss, units, policy, init)
    except Exception as error:  # of the user's code too: the optimizer's step, the choice of units
        failure = error
    place = _connect_or_raise(mesh, model, failure)
    if checked is not None and checked[2].sync_every is not None and checked[2].rendezvous is None:
        place = own_sites(place, checked[2].shard)
    plan = exchange = None
    notes: tuple[str, ...] = ()
    if checked is not None and checked[2].tp is not None:
        # A rank that does not come here has failed, or has another policy: it is in the exchange below meanwhile.
        notes = _cut(model, own, checked, place, loss)
        try:
            checked = checked_call(model, own, loss, units, policy, init)
        except Exception as error:
            checked, failure = None, error
    if checked is not None and checked[2].network == "measure":
        agree(place, "What compile_sharded was called with", f"{checked[2]}", failure)  # as above
        found = network.measured(place, machine_of(place.device).link(place.world))
        notes = (*notes, network.described(found))
        checked = (*checked[:2], replace(checked[2], network=found))
    if checked is not None:
        leaves, rules, policy = checked
        try:
            check_place(policy, rules, model.modules(), place)
            check_tensor_parallel(model, place, leaves, policy)
            replicas = place.replicate if policy.sync_every is None else 1  # which a step then does not know
            plan = make_plan(leaves, policy, place.device, place.shard, replicas, place.tp)
            plan = replace(plan, notes=(*plan.notes, *notes, *described(rules), *exchanges(policy, place.replicate)))
            exchange = programs_of(plan, place) if policy.sync_every is not None and own is not None else None
            text = _fingerprint(model, plan, rules, own) if place.world > 1 else ""
        except Exception as error:
            failure = error
    agree(place, "What compile_sharded was called with", text, failure)
    assert plan is not None and checked is not None
    with half_taken(place):
        begin = _begin(model, own, plan, place, init, checked[1])
        taken, state, random, whole, on_shards = lockstep(place, "What compile_sharded takes over", begin)
    maker = ProgramMaker(model, taken.open, loss, plan, place, Calls(place), random.bound)
    hyperparameters = Hyperparameters(own, plan.device)
    local = LocalSteps(plan, place, exchange, maker, state) if exchange is not None else None
    return Sharded(
        taken, own, Programs(maker, checked[1]), hyperparameters, Copies(plan), state, random, whole, on_shards, local
    )


def _cut(
    model: nn.Module,
    optimizer: Optimizer | None,
    checked: tuple[list[Any], tuple[Rule, ...], Policy],
    place: Mesh,
    loss: Callable[..., Any] | None,
) -> tuple[str, ...]:
    """Cuts the model along tp as `Policy.tp` says, if all ranks can; notes for the plan. Collective."""
    leaves, rules, policy = checked
    failure: Exception | None = None
    cuts = None
    try:
        check_place(policy, rules, model.modules(), place)
        check_policy(policy, place)
        make_plan(leaves, policy, place.device, place.shard, place.replicate, place.tp)  # raises for what it refuses
        cuts = find_cuts(model, optimizer, policy.tp, place, loss)
    except Exception as error:
        failure = error
    agree(place, "How compile_sharded cuts the model", f"{policy}\n{cuts}", failure)

    def work() -> Work[None]:
        assert cuts is not None
        yield "the cut"
        apply_cuts(model, optimizer, cuts, place)

    with half_taken(place):
        lockstep(place, "What compile_sharded cuts", work())
    assert cuts is not None
    for note in cuts.notes if place.rank == 0 else ():
        log.log(logging.WARNING if note.startswith("left whole") else logging.INFO, note)
    return cuts.notes


def _begin(
    model: nn.Module,
    optimizer: Optimizer | None,
    plan: Plan,
    place: Mesh,
    init: Callable[[nn.Module], Any] | None,
    rules: tuple[Rule, ...],
) -> Work[tuple[ManagedModel, State, RandomNumbers, tuple[WholeUpdate, ...], tuple[ShardUpdate, ...]]]:
    """Takes the model over and makes the state that training starts from; in stages, for `lockstep`."""
    step_counts = brought_by(optimizer, model, plan, rules)
    brought = [state_by_name(model, one) for one in members(optimizer)]
    taken, shards, buffers, existing_state = yield from take_over(model, optimizer, rules, plan, place, init)
    random = RandomNumbers(plan.device, place.rank, place.world, place.row if place.tp > 1 else None)
    state = State(
        parameters=shards,
        buffers=buffers,
        optimizer=optimizer_state(plan, rules, existing_state),
        constants={},
        sums={},
        scale=plan.policy.initial_scale(plan.device),
        random=random.state,
        step=torch.zeros((), dtype=torch.int64, device=plan.device),
    )
    state.step_counts = step_counts
    for note in (*described(rules), *_not_in_the_norm(plan)) if place.rank == 0 else ():
        log.warning(note)
    updates: list[WholeUpdate] = []
    on_shards: list[ShardUpdate] = []
    for (one, first), kept in zip(numbered(optimizer) if optimizer is not None else (), brought, strict=True):
        groups = range(first, first + len(one.param_groups))
        own = [rule for rule in rules if rule.group in groups and rule.eagerly is not None]
        whole = [rule for rule in own if rule.whole]
        if parts := [rule for rule in own if not rule.whole]:
            on_shards.append(ShardUpdate(one, parts, first, plan, place))
        if whole:
            for name in [slot.name for b in plan.buffers for slot in b.slots if slot.leaf.owned and slot.name in kept]:
                yield f"the optimizer's state of {name}"
                kept[name] = first_rank_s(kept[name], place, plan.device)
            update = WholeUpdate(one, [rule.group - first for rule in whole], plan, place, shards, kept)
            update.show(state.optimizer)
            updates.append(update)
    return taken, state, random, tuple(updates), tuple(on_shards)


def _not_in_the_norm(plan: Plan) -> Iterator[str]:
    """What ``clip_grad_norm_(model.parameters(), ...)`` would count, and `Policy.clip` does not."""
    buffers = [buffer for buffer in plan.buffers if buffer.trainable and not buffer.updated]
    if plan.policy.clip is not None and buffers and any(buffer.updated for buffer in plan.buffers):
        names = some([slot.name for buffer in buffers for slot in buffer.slots])
        yield (
            f"Policy.clip counts the gradients that an optimizer uses. The optimizer does not hold {names}: their "
            "gradients are not in the norm. Give them requires_grad=False, or give them to the optimizer."
        )


def _connect_or_raise(mesh: DeviceMesh | None, model: nn.Module, failure: Exception | None) -> Mesh:
    try:
        parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        return connect(mesh, parameter.device if parameter is not None else None)
    except ValueError as error:
        raise failure or error from None


def _fingerprint(model: nn.Module, plan: Plan, rules: tuple[Rule, ...], optimizer: Optimizer | None) -> str:
    """What every rank must have in common, a line each."""
    lines = [f"model {type(model).__qualname__}", f"policy {plan.policy}"]
    for buffer in plan.buffers:
        for slot in buffer.slots:
            leaf = slot.leaf
            lines.append(
                f"parameter {' = '.join(leaf.names)}: {str(leaf.dtype)[6:]}{list(leaf.shape)}, unit {buffer.unit}, "
                f"{'trainable' if leaf.trainable else 'frozen'}, group {leaf.group}"
                + (f", over tp: {leaf.tp}" if leaf.tp is not None else "")
            )
    lines += [f"buffer {name}: {str(b.dtype)[6:]}{list(b.shape)}" for name, b in model.named_buffers()]
    for one in members(optimizer):
        for group in one.param_groups:
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            lines.append(f"optimizer {type(one).__name__} {options}")
    if optimizer is not None:
        brought = {name: sorted(all_leaves(optimizer.state.get(p, {}))) for name, p in named_parameters(model)}
        lines += [f"optimizer's state of {name}: {', '.join(found)}" for name, found in brought.items() if found]
        lines += [f"optimizer's state {name}: {value.item()}" for name, value in read_scalars(optimizer).items()]
    lines += [f"rule {rule.name} {rule.state} {rule.eagerly or ''} {rule.whole}" for rule in rules]
    return "\n".join(lines)
