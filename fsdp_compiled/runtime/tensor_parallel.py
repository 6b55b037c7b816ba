"""Parameters that ``torch.distributed.tensor.parallel.parallelize_module`` made DTensors: their parts, and the whole.

Users cut their model with PyTorch's own plans and hand it over with the whole mesh. Each rank lays the parts that it
holds into its buffers, as if they were its parameters; what is cut how is in `plan.TensorParallel`. Parameters that
the plan did not name stay plain tensors, the same on every rank along the tp axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.plan.plan import Leaf, TensorParallel
from fsdp_compiled.policy import Policy

CURE = 'Cut the model with parallelize_module(model, mesh["tp"], plan), and pass the whole mesh to compile_sharded.'


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it; of a plain tensor, all."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def tensor_parallel(name: str, parameter: torch.Tensor) -> TensorParallel | None:
    """How the parameter lies along the tp axis; raises ``ValueError`` where it is neither cut evenly nor whole."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"{name} is a DTensor over a mesh of {mesh.ndim} axes {mesh.mesh_dim_names or ''}; expected the tp axis "
            f"alone. {CURE}"
        )
    (placement,) = parameter.placements
    shape = tuple(parameter.shape)
    if type(placement) is Replicate:
        return TensorParallel(None, shape)
    if type(placement) is not Shard:
        raise ValueError(
            f"{name} is a DTensor with placement {placement}; a parameter is cut along one dim, Shard(dim), or whole "
            "on each rank, Replicate()."
        )
    dim, size = placement.dim % len(shape), mesh.size()
    if shape[dim] % size:
        raise ValueError(
            f"{name}, {list(shape)}, is cut along dim {dim} over {size} ranks, which do not divide {shape[dim]}: their "
            f"parts would differ in size. Make it a multiple of {size} (pad the vocabulary, for one), or leave it out "
            "of the plan."
        )
    return TensorParallel(dim, shape)


def whole_value(parts: Sequence[torch.Tensor], leaf: Leaf) -> torch.Tensor:
    """The parameter, of the parts that ranks along the tp axis have of it, in order."""
    return torch.cat(list(parts), leaf.tp.dim) if leaf.split and leaf.tp is not None else parts[0]  # type: ignore[arg-type]


def part_of(whole: torch.Tensor, leaf: Leaf, tp: int, index: int) -> torch.Tensor:
    """What the rank at this place of ``tp`` ranks has of the whole parameter."""
    if not leaf.split:
        return whole
    assert leaf.tp is not None and leaf.tp.dim is not None
    return whole.chunk(tp, leaf.tp.dim)[index]


def check_tensor_parallel(model: nn.Module, mesh: Mesh, leaves: Sequence[Leaf], policy: Policy) -> None:
    """Raises ``ValueError`` where the model's DTensors do not lie on the mesh's tp axis, or there is no use for it."""
    axis = mesh.tp_mesh
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        if axis is None:
            raise ValueError(
                f'{name} is a DTensor, as parallelize_module makes them, but the mesh has no axis named "tp". {CURE}'
            )
        if not torch.equal(parameter.device_mesh.mesh, axis.mesh):
            raise ValueError(
                f"{name} is a DTensor over ranks {parameter.device_mesh.mesh.tolist()} of another mesh than the one "
                f"passed, whose tp axis is {axis.mesh.tolist()} here. {CURE}"
            )
    for name, buffer in model.named_buffers():
        if isinstance(buffer, DTensor):
            raise ValueError(
                f"The buffer {name} is a DTensor, which is not supported yet: leave its module out of the plan, or "
                "register its local part, buffer.to_local()."
            )
    if mesh.tp > 1 and policy.moving:
        raise ValueError(
            "Policy.dynamic is not supported under tensor parallelism yet. Leave it out, and give batches few shapes."
        )
    if mesh.tp > 1 and not any(leaf.split for leaf in leaves):
        raise ValueError(
            f'The mesh has {mesh.tp} ranks along "tp", but no parameter is cut along it: they would all do the same '
            f"work. {CURE} If the plan named modules, none of its names was found. Without tensor parallelism, leave "
            "the axis out."
        )
