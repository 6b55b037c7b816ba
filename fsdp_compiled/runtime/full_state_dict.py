"""Collects whole tensors on rank 0 from every rank's shards: of one flat buffer, or the model's state dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.lockstep import Work
from fsdp_compiled.distributed.mesh import Mesh, gather_parts, gather_shards
from fsdp_compiled.plan.plan import Buffer, Plan
from fsdp_compiled.runtime.managed_model import holding
from fsdp_compiled.runtime.shard_model import read_slot
from fsdp_compiled.runtime.state import wait_for_host_memory
from fsdp_compiled.runtime.tensor_parallel.parts import whole_value


def collected(own: torch.Tensor, buffer: Buffer, cut: bool, what: str, mesh: Mesh) -> Work[dict[str, torch.Tensor]]:
    """``[numel / shard]`` on each rank (all of it if not ``cut``) -> copies on rank 0's CPU, by parameter name.

    Other ranks get an empty dictionary. Runs in stages, as `lockstep` expects, each named by ``what``.
    """
    if cut:
        yield what
    full = gather_shards(own, mesh) if cut else own
    if buffer.split:
        yield f"{what}, over tp"
    parts = gather_parts(full, mesh) if buffer.split else [full]
    if mesh.rank != 0:
        return {}
    return {
        slot.name: whole_value([read_slot(part, slot) for part in parts], slot.leaf).detach().cpu().clone()
        for slot in buffer.slots
    }


def full_state_dict(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    shards: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Work[dict[str, Any]]:
    """The ordinary ``model.state_dict()``, on rank 0 and on the CPU; an empty dictionary elsewhere.

    Runs in stages, for `lockstep`: if one rank fails, for example in a hook of the model on rank 0, every rank raises
    an error. Nothing is changed.
    """
    wait_for_host_memory(plan)
    whole: dict[str, torch.Tensor] = {}
    for buffer in plan.buffers:
        own = shards[buffer.key].to(plan.device)
        found = yield from collected(own, buffer, plan.placement.parameter, buffer.key, mesh)
        for slot in buffer.slots if found else ():
            whole |= dict.fromkeys(slot.leaf.names, found[slot.name])
        del own
    if mesh.rank != 0:
        return {}
    instead: dict[int, torch.Tensor] = {
        id(old): nn.Parameter(whole[name], old.requires_grad) for name, old in named_parameters(model)
    }
    instead |= {id(old): buffers[name].detach().cpu().clone() for name, old in model.named_buffers()}
    with holding(model, instead):
        return model.state_dict()
