"""A parameter whose class decides what is sent in an all-gather and what comes out of it: FSDP2's extension protocol.

    shard.fsdp_pre_all_gather(mesh, ...)      -> what travels, and notes       int8[32, 64] and float32[32], say
    gathered over the ranks                   -> [64, 64] and [64]
    shard.fsdp_post_all_gather(these, ...)    -> what forward computes with    of any class

torchao's weights for BitNet, int8 and float8 training and NF4 are such parameters. They lie in no flat shard. Each is
gathered by itself before forward and kept until backward. The tensors it is made of are inputs of the programs
(`capture.model_tensors`). Its gradient is an output of backward, and is reduced after it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compiled.distributed.mesh import Mesh, gather_shards
from fsdp_compiled.plan.leaf import PROTOCOL, contiguous_stride
from fsdp_compiled.plan.plan import Buffer
from fsdp_compiled.plan.rows import lay_out_by_rows

if TYPE_CHECKING:
    from fsdp_compiled.runtime.fsdp.parameter_group import Entry, ParameterGroup


def extends(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class decides what is sent in an all-gather."""
    return all(hasattr(type(tensor), name) for name in PROTOCOL)


def check_extended(module: nn.Module, name: str, mesh: Mesh, shard_dim: int) -> None:
    """Raises ``ValueError`` for such a parameter that cannot be sharded, where FSDP2 raises too, at once or in its
    first forward."""
    parameter = module._parameters[name]
    if parameter is None or not extends(parameter):
        return
    where, kind = f"{type(module).__name__}.{name}", type(parameter).__name__
    asked = len(inspect.signature(parameter.fsdp_pre_all_gather).parameters)  # type: ignore[attr-defined]
    if asked not in (1, 5):
        raise ValueError(
            f"{kind}.fsdp_pre_all_gather, of {where}, has {asked} parameters; expected (mesh), or (mesh, outer_size, "
            "outer_stride, module, mp_policy), with which torch.distributed.fsdp calls it."
        )
    if shard_dim:
        raise ValueError(
            f"shard_placement_fn gives Shard({shard_dim}) for {where}, which is a {kind}: what its class sends is of "
            "rows. Give Shard(0) or None."
        )
    if parameter.shape[0] % mesh.shard:
        raise ValueError(
            f"{where} is a {kind} of {parameter.shape[0]} rows, which {mesh.shard} ranks do not divide: what its class "
            "sends would be of different sizes. Make the rows a multiple of the ranks."
        )
    if mesh.tp > 1:
        raise ValueError(
            f"{where} is a {kind}, which is not supported beside a tp axis yet. Train with fully_shard alone."
        )
    if not extends(rows := rows_of(parameter, mesh)):
        raise ValueError(
            f"{where} is a {kind}, of which rows are a {type(rows).__name__} without fsdp_pre_all_gather; expected a "
            f"{kind}. Let its __torch_dispatch__ give one for detach, split, new_zeros and slice, as FSDP2 asks."
        )


@torch.no_grad()
def rows_of(plain: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This rank's rows, made by the operators that FSDP2 expects of such a class, in memory of their own."""
    whole = plain.detach()
    if not whole.is_meta and whole.device.type != mesh.device.type:
        whole = whole.to(mesh.device)
    part = torch.chunk(whole, mesh.shard)[mesh.shard_rank]
    own = whole.new_zeros(part.size())
    own.narrow(0, 0, part.size(0)).copy_(part)
    return own.narrow(0, 0, part.size(0))


@dataclass(eq=False)
class Extended:
    """One such parameter, with its gradients that are held back: whole gradients of this rank (``held``), and gradients
    reduced along the shard axis alone (``partial``)."""

    entry: Entry
    group: ParameterGroup
    held: torch.Tensor | None = None
    partial: torch.Tensor | None = None
    counts: bool = False  # whether a backward reached the parameter since gradients are held back

    @property
    def waits(self) -> bool:
        return self.held is not None or self.partial is not None

    @property
    def local(self) -> Any:
        return self.entry.parameter._local_tensor  # type: ignore[attr-defined]

    @property
    def buffer(self) -> Buffer:
        """The buffer of its gradient alone."""
        laid_out = lay_out_by_rows("", "", [self.entry.leaf], self.group.mesh.shard)
        return replace(laid_out, division=self.group.division)

    @property
    def shard_mesh(self) -> DeviceMesh:
        mesh = self.group.device_mesh
        return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]

    @torch.no_grad()
    def gathered(self) -> torch.Tensor:
        """The gathered parameter that forward computes with. Collective."""
        local, parameter, precision = self.local, self.entry.parameter, self.group.precision
        module, name = self.entry.holders[0]
        if len(inspect.signature(local.fsdp_pre_all_gather).parameters) == 1:
            sent, notes = local.fsdp_pre_all_gather(self.shard_mesh)
        else:
            size = torch.Size(parameter.shape)
            sent, notes = local.fsdp_pre_all_gather(self.shard_mesh, size, contiguous_stride(size), module, precision)
        dtype = precision.param_dtype if parameter.is_floating_point() else None
        given = tuple(self._gather(one) for one in sent)
        made, _ = local.fsdp_post_all_gather(given, notes, dtype or parameter.dtype)
        if made.shape != parameter.shape:
            raise ValueError(
                f"{type(local).__name__}.fsdp_post_all_gather gave a tensor of shape {list(made.shape)} for "
                f"{type(module).__name__}.{name}; expected {list(parameter.shape)}, of the whole parameter."
            )
        return made.requires_grad_(parameter.requires_grad)  # type: ignore[no-any-return]

    def _gather(self, sent: torch.Tensor) -> torch.Tensor:
        """All-gathers the tensor as bytes, whatever its dtype: gloo supports few dtypes."""
        data = sent.contiguous().view(-1).view(torch.uint8)
        whole = gather_shards(data, self.group.mesh) if self.group.mesh.shard > 1 else data.clone()
        return whole.view(sent.dtype).view(-1, *sent.shape[1:])

    def drop(self) -> None:
        """Drops the gradients that were held back."""
        self.held = self.partial = None
        self.counts = False
