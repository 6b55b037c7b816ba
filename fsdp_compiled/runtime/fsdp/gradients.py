"""Leaves gradients of sharded parameters in ``grad`` after a backward in the user's loop: slices of flat gradients.

A parameter that no result depends on keeps the ``grad`` it has, None at first. Gradients of further backwards are
added, as autograd does. Without synchronisation (`set_requires_gradient_sync(False)`) a rank adds up its own flat
gradients and holds them back, whole, with the flat shard (`FlatShard.hold`). The next backward with synchronisation
reduces their sum, whichever methods they came from. Without all-reductions (`set_requires_all_reduce(False)`) a rank
adds up gradients that are reduced along the shard axis, until a backward with all-reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch.distributed.tensor import DTensor

from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.reduction import Call, reduction
from fsdp_compiled.plan.plan import Buffer, Plan
from fsdp_compiled.runtime.fsdp.extended_parameter import Extended
from fsdp_compiled.runtime.fsdp.parameter_group import Entry
from fsdp_compiled.torch_private.dtensor import over_slices

Reduce = Callable[[torch.Tensor], torch.Tensor]


def reductions(buffer: Buffer, dtype: torch.dtype, plan: Plan, mesh: Mesh) -> tuple[Reduce, Reduce]:
    """Two functions: ``[world * n]`` on each rank -> this rank's ``[n]``, and that -> the mean over replicas too.
    Collective."""
    calls = reduction(buffer, dtype, plan)
    over = next((place for place, call in enumerate(calls) if call.axis == "replicate"), len(calls))

    def run(part: Sequence[Call], flat: torch.Tensor) -> torch.Tensor:
        for call in part:
            axis = () if call.axis is None else (mesh.groups[call.axis],)
            flat = call.target(flat, *call.arguments, *axis, **call.options)
        return flat

    return partial(run, calls[:over]), partial(run, calls[over:])


def reduced_mean(flat: torch.Tensor, buffer: Buffer, plan: Plan, mesh: Mesh) -> torch.Tensor:
    """``[world * n]`` on each rank -> this rank's ``[n]`` of the mean. Collective."""
    along_shard, over_replicas = reductions(buffer, flat.dtype, plan, mesh)
    return over_replicas(along_shard(flat))


def parts(flat: torch.Tensor, entries: Iterable[Entry], start: int) -> dict[Entry, DTensor]:
    """These parameters' gradients. Each is a DTensor like its parameter, over a slice of the flat gradient. ``start``:
    where the gradients of these parameters' flat shard begin in it."""
    entries = sorted(entries, key=attrgetter("part.offset"))
    sizes, places, end = [start], [], 0
    for entry in entries:  # a single split takes a third of the time of as many slices
        part = entry.part
        if part.offset > end:
            sizes.append(part.offset - end)
        places.append(len(sizes))
        sizes.append(part.numel)
        end = part.end
    cut = flat[: start + end].split_with_sizes(sizes)
    views = (cut[place].view(entry.local.shape) for place, entry in zip(places, entries, strict=True))  # type: ignore[union-attr]
    made = over_slices(zip(views, (entry.spec for entry in entries), strict=True))
    return dict(zip(entries, made, strict=True))


def mean_of(
    one: Extended, gradient: torch.Tensor | None, counts: bool, everything: bool, plan: Plan, mesh: Mesh
) -> torch.Tensor | None:
    """This rank's rows of the mean of whole gradients, with the gradients that were held back. None where this call
    holds them back, or backward did not reach the parameter. Collective, unless this call holds them back.

    ``counts``: whether backward reached it; ``everything``: False where only some gradients are asked for, as by
    ``torch.autograd.grad``.
    """
    group, precision = one.group, one.group.precision
    counts = counts or group.pads
    if gradient is None:
        shape, dtype = one.entry.parameter.shape, precision.param_dtype or one.entry.parameter.dtype
        gradient = torch.zeros(shape, dtype=dtype, device=mesh.device)
    gradient = gradient.to(precision.reduce_dtype or gradient.dtype)
    if everything:
        gradient, counts = gradient if one.held is None else one.held + gradient, counts or one.counts
        one.held, one.counts = (None, counts) if group.synchronise else (gradient, counts)
        if not group.synchronise:
            return None
    along_shard, over_replicas = reductions(one.buffer, gradient.dtype, plan, mesh)
    shard = along_shard(gradient.reshape(-1))
    if everything:
        shard = shard if one.partial is None else one.partial + shard
        one.partial = None if group.all_reduces else shard
        if not group.all_reduces:
            return None
        one.counts = False
    shard = over_replicas(shard)
    return shard if counts else None


@torch.no_grad()
def leave(found: Mapping[Entry, DTensor]) -> None:
    """Adds these gradients to the parameters' ``grad``, or sets ``grad`` where it is None."""
    old: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for entry, gradient in found.items():
        parameter = entry.parameter
        before = parameter.grad
        if before is None:
            parameter.grad = gradient
        elif isinstance(before, DTensor) and (before._spec is gradient._spec or before._spec == gradient._spec):
            old.append(before._local_tensor)
            new.append(gradient._local_tensor)
        else:
            parameter.grad = before + gradient
    if old:
        torch._foreach_add_(old, new)
