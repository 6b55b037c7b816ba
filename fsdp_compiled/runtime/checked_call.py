"""Checks the arguments of compile_sharded, before anything is changed and without asking the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_compiled.capture.layers_across_ranks import SequenceAttention, check_attention, check_norms
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.kernels.aten_operators import widening
from fsdp_compiled.lower.fusions import check_names
from fsdp_compiled.lower.inductor import lowered
from fsdp_compiled.optim.given_optimizer import check_own_step, check_step_hooks, members
from fsdp_compiled.optim.rule import Rule, eager_rule
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.plan.leaf import Leaf, check_class, check_modules, check_parameter
from fsdp_compiled.plan.units import Choice, find_units
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.autograd_hooks import check_hooks
from fsdp_compiled.runtime.materialize import check_initializable
from fsdp_compiled.runtime.parameters.sharded_parameter import is_live
from fsdp_compiled.runtime.parameters.sharded_tensor import is_sharded
from fsdp_compiled.runtime.shard_model import parameters_of, read_leaves, read_scalars
from fsdp_compiled.runtime.shared_memory import check_shared_memory
from fsdp_compiled.torch_private import names


def checked_call(
    model: nn.Module,
    optimizer: Optimizer | None,
    loss: Callable[..., Any] | None,
    units: Choice | None,
    policy: Policy | None,
    init: Callable[[nn.Module], Any] | None,
) -> tuple[list[Leaf], tuple[Rule, ...], Policy]:
    """Makes every check that does not need the other ranks."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
    named = parameters_of(model)
    parameters = list({id(parameter): parameter for _, parameter in named}.values())
    special = [(name, one) for name, one in named if type(one) is not nn.Parameter]
    if any(is_live(one) for _, one in special):
        raise ValueError(
            f"This {type(model).__name__} was taken over by compile_sharded before: its parameters live in shards. "
            "Keep using the Sharded object, or build the model again and load sharded.full_state_dict() into it."
        )
    if name := next((name for name, one in special if is_sharded(one)), None):
        raise ValueError(
            f"{name} of this {type(model).__name__} is a copy of a parameter that is in shards already. Build it "
            "again, load sharded.full_state_dict() into it, and call compile_sharded on that."
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer or None.")
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy is a {type(policy).__name__}; expected fsdp_compiled.Policy.")
    for name, value in (("loss", loss), ("init", init)):
        if value is not None and not callable(value):
            raise ValueError(f"{name} is a {type(value).__name__}; expected a function or None.")
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to shard.")
    for name, one in named:
        check_parameter(name, one, "compile_sharded")
    devices = sorted(map(str, {parameter.device for parameter in parameters}))
    if len(devices) > 1:
        raise ValueError(f"The model's parameters are on several devices ({', '.join(devices)}); move them to one.")
    for name, one in special:
        check_class(name, one)
    for name, one in model.named_buffers():
        check_class(f"The buffer {name}", one, parameter=False)
    check_modules(model)
    check_names((policy or Policy()).without)
    modules = list(model.named_modules())
    check_norms(modules, policy or Policy())
    check_attention(modules, policy or Policy())
    check_hooks(model, named)
    check_shared_memory(modules, named)
    check_initializable(modules, init)
    leaves = read_leaves(named, optimizer, find_units(model, units))
    for one in members(optimizer):
        check_step_hooks(one)
        check_own_step(one)
    rules = make_rules(optimizer) if optimizer is not None else ()
    read_scalars(optimizer)
    whole = {rule.group for rule in rules if rule.whole}

    owned = [replace(leaf, owned=True) if leaf.trainable and leaf.group in whole else leaf for leaf in leaves]
    return owned, rules, lowered(policy or Policy())


def check_place(policy: Policy, rules: Sequence[Rule], modules: Iterable[nn.Module], place: Mesh) -> None:
    """Raises ``ValueError`` for what is not possible, or was not yet compared with eager PyTorch, on these ranks.
    ``place``: under local steps, with the sites along its replicate axis."""
    check_device(policy, place.device)
    if (rule := eager_rule(rules)) is not None:
        as_it_is = f"{rule.name} runs as it is, after the program ({rule.eagerly}), "
        if place.tp > 1:
            raise ValueError(
                f"{as_it_is}which is not supported under tensor parallelism yet. Take an optimizer whose update can be "
                "traced, such as AdamW."
            )
        if policy.offload:
            raise ValueError(
                f"Policy.offload is True, but {as_it_is}and would work on shards in host memory. Leave offload out, or "
                "take an optimizer whose update can be traced."
            )
    yet = {"wire": policy.wire, "sync_every": policy.sync_every, "rendezvous": policy.rendezvous}
    given = [f"Policy.{name} is {value!r}" for name, value in yet.items() if value is not None]
    if policy.sync_every is not None:
        _check_local(policy, given[-1], modules, place)
    if given and place.tp > 1:
        raise ValueError(f"{given[-1]}, which is not supported under tensor parallelism yet. Leave one of them out.")
    if given and (whole := next((rule for rule in rules if rule.whole), None)):
        raise ValueError(
            f"{given[-1]}, but {whole.name} updates whole matrices on owners, which it does not go with yet."
        )


def check_device(policy: Policy, device: torch.device) -> None:
    """Raises ``ValueError`` for what this kind of device does not have."""
    if policy.cuda_graph is True and device.type != "cuda":
        raise ValueError(f'Policy.cuda_graph is True, which needs a GPU: the model is on {device}. Use "auto".')
    if policy.offload and device.type == "cpu":
        raise ValueError(
            f"Policy.offload is True, but the model is on {device}: its shards are in host memory already. Take it "
            'out. What makes a rank hold less: more ranks, Policy(shard="zero3", recompute="unit"), limit=2.'
        )
    if policy.unrounded_gradients and (why := widening(device)):
        raise ValueError(
            "Policy.unrounded_gradients needs matrix products of bfloat16 that are written in float32, which PyTorch "
            f"does not have on {device}: {why}. Leave it out: gradients are then rounded to the compute dtype, as "
            "FSDP2's are."
        )


def _check_local(policy: Policy, what: str, modules: Iterable[nn.Module], place: Mesh) -> None:
    """Raises ``ValueError`` if local steps are not possible here."""
    if policy.rendezvous is not None:
        if place.replicate > 1:
            raise ValueError(
                f"{what}: its sites are jobs of their own, but this mesh has {place.replicate} rows, which exchange as "
                "sites do. Give a mesh of one axis, or none; or leave rendezvous out."
            )
        if gone := names.missing("sites that come and go"):
            raise ValueError(f"{what}, but PyTorch {torch.__version__} has no {gone[0]}. Leave it out.")
    elif place.replicate == 1 and place.world > 1:
        raise ValueError(
            f"{what}, but the mesh has one site of {place.shard} ranks, which exchange in every step. Give a mesh with "
            'two axes, ("replicate", "shard"), whose rows are the sites; or shard="ddp", where each rank is one.'
        )
    if any(isinstance(module, SequenceAttention) and module.axis == "replicate" for module in modules):
        raise ValueError(
            f'{what}, but a SequenceAttention goes along "replicate", which no step crosses. Put it along "shard".'
        )
