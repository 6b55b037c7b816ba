"""Gradients of sharded parameters, as a backward in the user's loop leaves them: slices of flat gradients, in ``grad``.

A parameter that no result depends on keeps the ``grad`` it has, None at first. Gradients of further backwards are
added, as autograd does. Without synchronisation (`set_requires_gradient_sync(False)`) a rank's own flat gradients are
added up and held back, whole, with the flat shard (`FlatShard.hold`), until a backward with it; then their sum is
reduced, whichever methods they came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.ir.reduction import reduction
from fsdp_compiled.plan.plan import Buffer, Plan
from fsdp_compiled.runtime.parameter_group import Entry
from fsdp_compiled.torch_private.dtensor import over_slices


def reduced(flat: torch.Tensor, buffer: Buffer, plan: Plan, mesh: Mesh) -> torch.Tensor:
    """``[world * n]`` on each rank -> this rank's ``[n]`` of the mean. Collective."""
    for call in reduction(buffer, flat.dtype, plan):
        axis = () if call.axis is None else (mesh.groups[call.axis],)
        flat = call.target(flat, *call.arguments, *axis, **call.options)
    return flat


def parts(flat: torch.Tensor, entries: Iterable[Entry], start: int) -> dict[Entry, DTensor]:
    """These parameters' gradients, each a DTensor like the parameter over a slice of the flat gradient, in which those
    of their flat shard begin at ``start``."""
    entries = list(entries)
    made = over_slices(
        (flat[start + entry.first : start + entry.last].view(entry.local.shape), entry.spec)  # type: ignore[union-attr]
        for entry in entries
    )
    return dict(zip(entries, made, strict=True))


@torch.no_grad()
def leave(found: Mapping[Entry, DTensor]) -> None:
    """Adds these to the parameters' ``grad``, or lets them be it."""
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
