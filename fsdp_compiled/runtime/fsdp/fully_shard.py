"""fully_shard: FSDP2's function, for a loop of the user's own.

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)                          parameters are DTensors from here on, as FSDP2's are
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn(model(tokens), targets).backward()  the first call compiles forward and backward as two programs
    optimizer.step()

A script written for FSDP2 changes its import. The work is done in `runtime.fsdp.parameter_group` (parameters),
`runtime.fsdp.module_class` (methods) and `runtime.fsdp.module_call` (programs).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Shard

from fsdp_compiled.capture.side_effects import inside
from fsdp_compiled.distributed.device_mesh import device_mesh_of_all, place_in, tp_beside
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.lower.inductor import lowered
from fsdp_compiled.plan.leaf import check_class, check_modules, check_parameter
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.autograd_hooks import hook_on
from fsdp_compiled.runtime.fsdp.extended_parameter import check_extended, extends
from fsdp_compiled.runtime.fsdp.local_updates import OURS
from fsdp_compiled.runtime.fsdp.module_class import FSDPModule, give_class, register_fsdp_forward_method
from fsdp_compiled.runtime.fsdp.module_state import ModuleState, lay_out, state_of
from fsdp_compiled.runtime.fsdp.parameter_group import ENTRY, Entry, Holder, ParameterGroup, check_divided
from fsdp_compiled.runtime.tensor_parallel.parts import (
    check_buffers,
    check_even,
    check_policy,
    check_ties,
    tensor_parallel,
)

# The fields of `Policy` that a loop of the user's decides by itself, each with the place where it does.
ELSEWHERE = {
    "reshard_onto": "Pass it as reshard_after_forward=.",
    "clip": "Call torch.nn.utils.clip_grad_norm_(model.parameters(), ...) in the loop.",
    "clip_value": "Call torch.nn.utils.clip_grad_value_(model.parameters(), ...) in the loop.",
    "loss_scale": "Use torch.amp.GradScaler in the loop.",
    "accumulate": "Use model.set_requires_gradient_sync in the loop.",
    "weigh": "Weigh the loss in the loop.",
    "offload": "It is not supported with fully_shard yet: leave it out.",
    "precision": "Pass it as mp_policy=.",
    "sync_every": "Local steps are for compile_sharded: leave it out.",
    "outer": "Local steps are for compile_sharded: leave it out.",
    "wire": "It is not supported with fully_shard yet: leave it out.",
    "tp": 'Call parallelize_module(model, mesh["tp"], plan) before fully_shard.',
}
FULL_PRECISION, NO_OFFLOAD = MixedPrecisionPolicy(), OffloadPolicy()


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = FULL_PRECISION,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    policy: Policy | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shards the parameters of a module, but for those that an earlier call inside it took; as FSDP2's function.

    module
        An ``nn.Module`` with a forward, or a list of them, whose parameters are gathered together. Call it on the
        blocks of a model and then on the model. Parameters become DTensors, ``Shard(0)`` on the mesh, of this rank's
        values; the module stays the same object, of its own class and `FSDPModule`.
    mesh
        A ``DeviceMesh`` of all ranks: one axis, which shards, or two: the first replicates, the second shards. Of a
        model that ``parallelize_module`` cut along ``mesh["tp"]``, the other axes of that mesh. Left out: all ranks
        that there are; without ``torchrun``, a world of one.
    reshard_after_forward
        True, or None: parameters are freed after forward and gathered again for backward, but for the unit that
        backward needs first. A number of ranks, as the 8 of a node: until then each rank keeps its part of them as cut
        over so many neighbours, and backward gathers among these. False: they are kept.
    shard_placement_fn
        Gives the placement of each parameter: ``Shard(dim)``, of a dim that the ranks along the shard axis divide, or
        None for ``Shard(0)``, whose rows need not be a multiple of them.
    mp_policy
        torch's ``MixedPrecisionPolicy``, of these modules; others may have another.
    ignored_params
        Parameters that stay as they are: whole on every rank, their gradients this rank's own.
    policy
        A `Policy`, once for a model: how programs are made. Left out: PyTorch's own kernels, in FSDP2's arithmetic;
        ``Policy()`` compiles with Inductor.

    Returns the module. Raises ``ValueError`` or ``NotImplementedError`` for what is not supported, before anything is
    changed. No rank waits for another: ranks meet in the first call of the model.
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    # Of a module under `torch.compile`, take the module inside: that one is traced, as it is.
    modules = [inside(one) if isinstance(one, nn.Module) else one for one in modules]
    _check_modules(modules)
    _check_options(dp_mesh_dims, policy)
    policy = lowered(policy) if policy is not None else None
    _check_precision(mp_policy)
    device_mesh = mesh if mesh is not None else device_mesh_of_all()
    holders = list(_holders(modules, ignored_params or set()))
    tied = [(entry, places) for places in holders if (entry := _taken(places)) is not None]
    holders = [places for places in holders if _taken(places) is None]
    for places in holders:
        _check_parameter(places)
    place = place_in(device_mesh, _tp_axis(device_mesh, holders))
    shard_dims = [_shard_dim(places, shard_placement_fn, place.shard) for places in holders]
    for places, dim in zip(holders, shard_dims, strict=True):
        check_extended(*places[0], place, dim)
    _check_tp(place, policy, modules)
    _check_offload(offload_policy, place.device)
    reshard = _reshard(reshard_after_forward, place.shard)
    _move_buffers(modules, place.device)
    group = ParameterGroup(modules, holders, shard_dims, device_mesh, place, mp_policy, reshard)
    for entry, places in tied:
        for holder in places:
            entry.tie(holder)
    for one in modules:
        give_class(one, ModuleState(group, policy))
    for one in modules:
        lay_out(one)
    return module


def _check_modules(modules: Sequence[Any]) -> None:
    if not modules:
        raise ValueError("fully_shard was given an empty list; expected modules.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard expects nn.Module or list[nn.Module] but got {type(module)}")
        check_modules(module)
        if state_of(module) is not None:
            raise ValueError(f"fully_shard was called on this {type(module).__name__} before. Call it once a module.")
        if isinstance(module, TorchFSDPModule):
            raise ValueError(
                f"This {type(module).__name__} was sharded by torch.distributed.fsdp.fully_shard. Import fully_shard "
                "from fsdp_compiled in all places."
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
        if "forward" in vars(module) and not _is_method_of(module, vars(module)["forward"]):
            raise ValueError(
                f"This {type(module).__name__} has a forward of its own, module.forward = ..., that is no method of it "
                "and cannot be compiled. Bind it, module.forward = types.MethodType(function, module), or define it in "
                "the class."
            )


def _is_method_of(module: nn.Module, function: Any) -> bool:
    return isinstance(function, MethodType) and function.__self__ is module


def _check_options(dims: Any, policy: Policy | None) -> None:
    if dims is not None:
        raise NotImplementedError(
            "dp_mesh_dims is not supported by fsdp_compiled.fully_shard. Pass the data-parallel mesh as mesh=."
        )
    if policy is None:
        return
    if not isinstance(policy, Policy):
        raise ValueError(f"policy is a {type(policy).__name__}; expected fsdp_compiled.Policy.")
    usual = Policy()
    for name, cure in ELSEWHERE.items():
        if getattr(policy, name) != getattr(usual, name):
            raise ValueError(f"Policy.{name} is not for fully_shard, whose loop is the user's. {cure}")
    if policy.network == "measure":
        raise ValueError(
            'Policy.network="measure" is not supported with fully_shard yet, whose first call ranks may come to apart. '
            "Say what the network carries, in gigabits a second: Policy(network=1.0)."
        )
    if policy.shard not in ("zero3", "zero2"):
        raise ValueError(
            f'Policy.shard is {policy.shard!r}, but fully_shard shards parameters: give "zero3", or "zero2" to keep '
            "them gathered from forward to backward."
        )
    for name in ("kernels", "copies", "cuda_graph"):
        if getattr(policy, name) is True:
            raise ValueError(f"Policy.{name}=True is not supported with fully_shard yet. Leave it out.")


def _tp_axis(mesh: DeviceMesh, holders: Sequence[Sequence[Holder]]) -> DeviceMesh | None:
    """The axis along which `parallelize_module` cut the model, if it did: the mesh of the parameters that are DTensors,
    or the axis named "tp" of the mesh that ``mesh`` is a part of. Raises ``ValueError`` for DTensors over several
    meshes."""
    found = tp_beside(mesh)
    for module, name in (places[0] for places in holders):
        parameter = module._parameters[name]
        if isinstance(parameter, DTensor):
            axis = parameter.device_mesh
            if found is not None and axis != found:
                raise ValueError(
                    f"{type(module).__name__}.{name} is a DTensor over ranks {axis.mesh.tolist()}, and the tp axis is "
                    f'{found.mesh.tolist()} here. Cut all of the model with parallelize_module(model, mesh["tp"], '
                    'plan), and give fully_shard mesh=mesh["dp"] of the same mesh.'
                )
            found = axis
    return found


def _check_tp(place: Mesh, policy: Policy | None, modules: Sequence[nn.Module]) -> None:
    """Raises ``ValueError`` for options and buffers that are not supported together with tensor parallelism."""
    if policy is not None:
        check_policy(policy, place)
    if place.tp == 1:
        return
    for module in modules:
        check_ties(module, place)
        check_buffers(module)


def _check_precision(precision: MixedPrecisionPolicy) -> None:
    if not isinstance(precision, MixedPrecisionPolicy):
        raise ValueError(
            f"mp_policy is a {type(precision).__name__}; expected torch.distributed.fsdp.MixedPrecisionPolicy."
        )


def _check_offload(offload: OffloadPolicy, device: torch.device) -> None:
    if isinstance(offload, CPUOffloadPolicy) and device.type != "cpu":
        raise NotImplementedError(
            "CPUOffloadPolicy is not supported by fsdp_compiled.fully_shard yet. Leave offload_policy out; or use "
            "compile_sharded with Policy(offload=True)."
        )


def _reshard(wanted: bool | int | None, world: int) -> bool | int:
    if wanted is None or isinstance(wanted, bool):
        return wanted is not False
    if not isinstance(wanted, int) or wanted < 1 or world % wanted:
        raise ValueError(
            f"reshard_after_forward is {wanted!r}; expected True, False, None, or a number of ranks that divides the "
            f"{world} along the shard axis."
        )
    return wanted == world if wanted in (1, world) else wanted


def _managed(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """These modules and those inside them, without those that an earlier call of `fully_shard` took."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in seen or state_of(module) is not None:
            return
        if isinstance(module, TorchFSDPModule):
            raise ValueError(
                f"A {type(module).__name__} inside was sharded by torch.distributed.fsdp.fully_shard. Import "
                "fully_shard from fsdp_compiled in all places."
            )
        seen.add(module)
        yield module
        for child in module.children():
            yield from walk(child)

    for module in modules:
        yield from walk(module)


def _holders(modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> Iterator[list[Holder]]:
    """For each parameter, every place in these modules that holds it. Parameters of earlier calls are left out."""
    left_out = {id(one) for one in ignored}
    taken = {
        id(entry.parameter)
        for module in modules
        for inner in module.modules()
        if (state := state_of(inner)) is not None
        for entry in state.group.entries
    }
    found: dict[int, list[Holder]] = {}
    for module in _managed(modules):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in left_out and id(parameter) not in taken:
                found.setdefault(id(parameter), []).append((module, name))
    yield from found.values()


def _taken(places: Sequence[Holder]) -> Entry | None:
    """The entry of an earlier call that replaced this parameter, on a module that shares the parameter with these."""
    module, name = places[0]
    found = vars(module._parameters[name]).get(ENTRY)
    return found() if found is not None else None


def _check_parameter(holders: Sequence[Holder]) -> None:
    module, name = holders[0]
    parameter = module._parameters[name]
    where = f"{type(module).__name__}.{name}"
    assert parameter is not None
    if OURS in vars(parameter):
        raise ValueError(
            f"{where} was sharded by an earlier call of fully_shard, on a module that is not inside of this one. Call "
            "fully_shard on inner modules first, and on the model last; where modules share a part, on that part first."
        )
    check_parameter(where, parameter, "fully_shard")
    if not extends(parameter):
        check_class(where, parameter)
    if isinstance(parameter, DTensor) and parameter.dim():
        check_even(where, tensor_parallel(where, parameter))  # which refuses what is neither cut nor whole
    if parameter.dim() == 0:
        raise ValueError(f"fully_shard doesn't support scalar parameters. Make {where} a 1D tensor with 1 element.")
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"fully_shard does not support non-contiguous parameters: {where} has shape {list(parameter.shape)} and "
            f"strides {parameter.stride()}. Make it contiguous: parameter.data = parameter.data.contiguous()."
        )
    if (kind := hook_on(parameter)) is not None:
        raise ValueError(
            f"{where} has a hook ({kind}), which the sharded parameter that takes its place would not have. "
            "Register it after fully_shard."
        )


def _shard_dim(holders: Sequence[Holder], wanted: Callable[[nn.Parameter], Any] | None, ranks: int) -> int:
    """The dim of a parameter that the ranks divide. Raises ``ValueError`` for a value that is no placement of the
    parameter, and ``NotImplementedError`` for a placement that is not supported."""
    module, name = holders[0]
    parameter = module._parameters[name]
    assert parameter is not None
    if wanted is None or (placement := wanted(parameter)) is None:
        return 0
    where = f"{type(module).__name__}.{name}"
    if hasattr(placement, "mesh_info"):
        raise NotImplementedError(
            f"shard_placement_fn gives another mesh for {where}, which fsdp_compiled.fully_shard does not support. "
            "Return Shard(dim) or None."
        )
    if type(placement) is not Shard or not -parameter.dim() <= placement.dim < parameter.dim():
        raise ValueError(
            f"shard_placement_fn gives {placement!r} for {where}, of shape {list(parameter.shape)}; expected None or "
            f"Shard(dim), with a dim from 0 to {parameter.dim() - 1}."
        )
    dim = placement.dim % parameter.dim()
    check_divided(where, parameter, tensor_parallel(where, parameter), dim, ranks)
    return dim


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Moves buffers in place: modules may share a buffer, and other objects may hold it."""
    for module in _managed(modules):
        for tensor in module._buffers.values():
            if tensor is not None and not tensor.is_meta and tensor.device != device:
                tensor.data = tensor.to(device)


__all__ = [
    "CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle", "fully_shard",
    "register_fsdp_forward_method",
]  # fmt: skip
