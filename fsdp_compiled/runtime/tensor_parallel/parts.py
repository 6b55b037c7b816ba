"""Parameters that ``torch.distributed.tensor.parallel.parallelize_module`` made DTensors: their parts, and the whole.

Users cut their model with PyTorch's own plans and pass it with the whole mesh. Each rank puts the parts that it holds
into its buffers, as if they were its parameters. `plan.TensorParallel` says how each one is cut. Parameters that the
plan did not name stay plain tensors, the same on every rank along the tp axis.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.plan.leaf import Leaf, TensorParallel
from fsdp_compiled.policy import Policy

log = logging.getLogger("fsdp_compiled")
CURE = 'Cut the model with parallelize_module(model, mesh["tp"], plan), and pass the whole mesh to compile_sharded.'


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; all of a plain tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def laid_part(tensor: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """This rank's part in the leaf's shape. If it is smaller than the first part, zeros are added at its end."""
    if leaf.tp is None or leaf.tp.dim is None:
        return local_part(tensor)
    return _padded(local_part(tensor), leaf.tp.dim, leaf.shape[leaf.tp.dim])


def _padded(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """The value, padded with zeros at its end to ``length`` along ``dim``."""
    if value.shape[dim] == length:
        return value
    shape = [length - size if place == dim else size for place, size in enumerate(value.shape)]
    return torch.cat([value, value.new_zeros(shape)], dim)


def tensor_parallel(name: str, parameter: torch.Tensor) -> TensorParallel | None:
    """How the parameter lies along the tp axis; raises ``ValueError`` where it is neither cut along it nor whole."""
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
    return TensorParallel(placement.dim % len(shape), shape, mesh.size())


def check_even(name: str, tp: TensorParallel | None) -> None:
    """Raises ``ValueError`` where ranks would have parts of different sizes."""
    if tp is not None and tp.dim is not None and tp.uneven:
        raise ValueError(
            f"{name}, {list(tp.shape)}, is cut along dim {tp.dim} over {tp.parts} ranks, which do not divide "
            f"{tp.shape[tp.dim]}: their parts would differ in size, and rows of them would be no DTensor. Make it a "
            f"multiple of {tp.parts} (pad the vocabulary, for one), leave it out of the plan, or use compile_sharded, "
            "which takes such parts."
        )


def whole_value(parts: Sequence[torch.Tensor], leaf: Leaf) -> torch.Tensor:
    """The whole parameter, made of the parts of the ranks along the tp axis, in order."""
    if not leaf.split:
        return parts[0]
    assert leaf.tp is not None and leaf.tp.dim is not None
    return torch.cat(list(parts), leaf.tp.dim).narrow(leaf.tp.dim, 0, leaf.tp.shape[leaf.tp.dim])


def part_of(whole: torch.Tensor, leaf: Leaf, tp: int, index: int) -> torch.Tensor:
    """The part of the whole parameter that rank ``index`` of ``tp`` ranks puts into its buffers."""
    if not leaf.split:
        return whole
    assert leaf.tp is not None and leaf.tp.dim is not None
    each = leaf.shape[leaf.tp.dim]
    return _padded(whole, leaf.tp.dim, each * tp).narrow(leaf.tp.dim, index * each, each)


def check_policy(policy: Policy, mesh: Mesh) -> None:
    """Raises ``ValueError`` for options that are not available under tensor parallelism, or without it."""
    if policy.async_tp:
        if mesh.tp == 1:
            why = "the mesh has no tp axis of several ranks, whose products it would cut"
        elif mesh.device.type != "cuda":
            why = (
                "it writes into the memory of other GPUs (torch.distributed._symmetric_memory), and this mesh is of "
                f"{mesh.device.type} devices"
            )
        else:
            why = "it has not been run on a GPU under this package, and so is not carried out yet"
        raise ValueError(
            f"Policy.async_tp is True, which is refused here: {why}. Leave it out: collectives along tp then start and "
            "are waited for as data allows (the pass overlap)."
        )
    if mesh.tp > 1 and policy.moving:
        raise ValueError(
            "Policy.dynamic is not supported under tensor parallelism yet. Leave it out, and give batches few shapes."
        )


def check_buffers(model: nn.Module) -> None:
    """Raises ``ValueError`` for a buffer that is a DTensor."""
    for name, buffer in model.named_buffers():
        if isinstance(buffer, DTensor):
            raise ValueError(
                f"The buffer {name} is a DTensor, which is not supported yet: leave its module out of the plan, or "
                "register its local part, buffer.to_local()."
            )


def check_ties(model: nn.Module, mesh: Mesh) -> None:
    """Raises ``ValueError`` if a tie of weights was broken, as `parallelize_module` does.

    The config of a transformers model says that its head has the embedding's weight. For other models the sign is two
    trained DTensors with the same values. This only logs a warning, since they may be meant to be separate.
    """
    cut = {name: one for name, one in named_parameters(model, remove_duplicate=False) if isinstance(one, DTensor)}
    asked = getattr(getattr(model, "config", None), "tie_word_embeddings", False) and bool(cut)
    ends: list[Any] = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output") if asked]
    weights = [end.weight for end in ends if isinstance(getattr(end, "weight", None), torch.Tensor)]
    if len(weights) == 2 and weights[0] is not weights[1] and any(isinstance(one, DTensor) for one in weights):
        raise ValueError(
            f"The config of {type(model).__name__} ties the embedding's weight and the head's, and they are two "
            "parameters now: parallelize_module breaks ties. Tie them again before the optimizer is made: "
            "model.tie_weights(), or model.get_output_embeddings().weight = model.get_input_embeddings().weight."
        )
    seen: dict[Any, str] = {}
    for name, one in cut.items():
        local = one.detach().to_local()
        if local.is_meta or not one.requires_grad or local.dim() < 2 or not local.numel():
            continue
        if bool((local == local.reshape(-1)[0]).all()):  # ones, zeros
            continue
        key = (tuple(one.shape), one.placements, one.dtype, local.double().sum().item())
        other = seen.setdefault(key, name)
        tied = cut[other] is one
        if not tied and mesh.rank == 0 and torch.equal(cut[other].detach().to_local(), local):
            log.warning(
                "%s and %s have the same values and are two parameters. If they were tied, parallelize_module has "
                "broken the tie: tie them again before the optimizer is made.", other, name,
            )  # fmt: skip


def check_tensor_parallel(model: nn.Module, mesh: Mesh, leaves: Sequence[Leaf], policy: Policy) -> None:
    """Raises ``ValueError`` if the model's DTensors are not on the mesh's tp axis, or if nothing uses that axis."""
    axis = mesh.tp_mesh
    cut = any(leaf.tp is not None for leaf in leaves)
    for name, parameter in named_parameters(model) if cut else ():
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
    check_buffers(model)
    check_policy(policy, mesh)
    if cut:
        check_ties(model, mesh)
    if mesh.tp > 1 and not any(leaf.split for leaf in leaves):
        raise ValueError(
            f'The mesh has {mesh.tp} ranks along "tp", but no parameter is cut along it: they would all do the same '
            f"work. {CURE} If the plan named modules, none of its names was found. Without tensor parallelism, leave "
            "the axis out."
        )
