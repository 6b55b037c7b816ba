"""A call of a model that compile_sharded took over: its own code, with all parameters gathered.

    model(x)                     gathers every parameter, runs the model's forward, frees them
    loss_of(model(x)).backward() gradients of the inputs, which the other network of a GAN needs; and, as in FSDP2, the
                                 mean over ranks of the parameters' gradients, in ``parameter.grad``

Such a call is not compiled, and holds the whole model while it runs, and until backward if there is one. To train and
evaluate, use `Sharded`. Hooks of the model's root gather and free: they run before all other hooks and after them. So
copies of the model (`copy.deepcopy`, `AveragedModel`) can be called as well.

`gathered` is the same for many calls, without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compiled.capture.fake_inputs import cast
from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.plan.leaf import contiguous_stride
from fsdp_compiled.runtime.fsdp.gradients import reduced_mean
from fsdp_compiled.runtime.parameters.shard_layout import Layout, ShardPlace
from fsdp_compiled.runtime.parameters.sharded_operators import gradient_at, whole_of
from fsdp_compiled.runtime.parameters.sharded_parameter import WholeParameter, is_live
from fsdp_compiled.runtime.parameters.sharded_tensor import is_sharded

Tables = list[tuple[dict[str, Any], dict[str, Any]]]
Held = tuple[Tables, list[tuple[str, torch.Tensor, int]]]  # old table entries; the whole tensors put there, by version
_open: dict[int, list[Held]] = {}  # calls that run now, by model's id


class Owner:
    """Marks a model that was taken over. A copy whose parameters are ordinary ones was not, and has None instead."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __deepcopy__(self, _: Any) -> Owner | None:
        return None if self.layout.whole else self

    def __reduce__(self) -> Any:
        return type(None), ()


def register(model: nn.Module, layout: Layout) -> list[Any]:
    """Makes the model callable. Returns the handles that remove the hooks again."""
    owner = Owner(layout)
    return [
        model.register_forward_pre_hook(partial(_gather, owner), prepend=True, with_kwargs=True),
        model.register_forward_hook(partial(_free, owner), always_call=True),
    ]


def _gather(owner: Owner | None, model: nn.Module, args: Any, kwargs: Any) -> Any:
    if owner is None:
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"This {type(model).__name__} was taken over by compile_sharded: its parameters live in shards. In a "
            "compiled function call the Sharded object, sharded(*inputs), outside."
        )
    held: Held = ([], [])
    _open.setdefault(id(model), []).append(held)
    layout = owner.layout
    named = [(name, one) for name, one in named_parameters(model) if is_live(one) or is_sharded(one)]
    if not named:
        return _cast_inputs(layout, args, kwargs) if layout.gathered is model else None
    if layout.mesh.world > 1 or layout.plan.policy.precision.param_dtype is not None or not layout.whole:
        _put(model, named, _wholes(layout, [one for _, one in named], type(model).__name__), held)
    layout.differentiated |= torch.is_grad_enabled()
    return _cast_inputs(layout, args, kwargs)


def _put(model: nn.Module, named: Sequence[tuple[str, Any]], wholes: Sequence[torch.Tensor], held: Held) -> None:
    """Puts ``wholes`` in place of the parameters."""
    instead = {id(one): whole for (_, one), whole in zip(named, wholes, strict=True)}
    for module in model.modules():
        _exchange(module, instead, held[0])
    held[1].extend(
        (name, whole, whole._version)
        for (name, one), whole in zip(named, wholes, strict=True)
        if not isinstance(one, WholeParameter) or whole.dtype != one.dtype
    )


def _put_back(held: Held, where: str) -> None:
    """Puts the parameters back. Raises ``RuntimeError`` if a tensor that stood in their place was written to."""
    tables, wholes = held
    for table, before in tables:
        table.update(before)
    for name, whole, version in wholes:
        if whole._version != version:
            raise RuntimeError(
                f"{name} was written to {where}, while it was gathered, which would be lost: the shards are what is "
                "trained. Write to model parameters before or after."
            )


def _cast_inputs(layout: Layout, args: Any, kwargs: Any) -> Any:
    precision = layout.plan.policy.precision
    if precision.param_dtype is not None and precision.cast_forward_inputs:
        return cast((args, kwargs), precision.param_dtype)
    return None


def wholes_of(model: nn.Module) -> list[torch.Tensor]:
    """Each of its parameters, whole and frozen, in the compute dtype. Collective."""
    with torch.no_grad():
        return [nn.Parameter(_whole(one), requires_grad=False) for one in model.parameters()]


def hold(model: nn.Module, layout: Layout, wholes: Sequence[torch.Tensor]) -> Held:
    """Puts ``wholes`` in place of the parameters for many calls. Returns the argument of `release`."""
    held: Held = ([], [])
    _put(model, list(named_parameters(model)), wholes, held)
    layout.gathered = model
    return held


def release(layout: Layout, held: Held) -> None:
    """Puts the parameters back. Raises ``RuntimeError`` where a gathered one was written to."""
    layout.gathered = None
    _put_back(held, "inside of gathered")


def _free(owner: Owner | None, model: nn.Module, _args: Any, result: Any) -> Any:
    if owner is None:
        return None
    calls = _open.get(id(model), [])
    if not calls:
        return None
    held = calls.pop()
    if not calls:
        del _open[id(model)]
    _put_back(held, "in forward")
    layout = owner.layout
    dtype = layout.plan.policy.precision.output_dtype
    return cast(result, dtype) if dtype is not None and (held[0] or layout.gathered is model) else None


def _place_of(parameter: Any) -> ShardPlace:
    place: ShardPlace = parameter._sharded_place if isinstance(parameter, WholeParameter) else parameter._sharded.place
    return place


def _exchange(module: nn.Module, instead: dict[int, torch.Tensor], held: Tables) -> None:
    """Puts these in place of parameters, by ``id``, and in the list of weights that recurrent layers keep."""
    before = {name: one for name, one in module._parameters.items() if id(one) in instead}
    if before:
        module._parameters.update({name: instead[id(one)] for name, one in before.items()})  # type: ignore[misc]
        held.append((module._parameters, before))
    if isinstance(module, nn.RNNBase):
        flat = vars(module)["_flat_weights"]
        held.append((vars(module), {"_flat_weights": flat}))
        vars(module)["_flat_weights"] = [instead.get(id(one), one) for one in flat]


def _wholes(layout: Layout, parameters: Sequence[Any], name: str) -> Sequence[torch.Tensor]:
    """Each parameter, whole and in the compute dtype. Collective."""
    trained = torch.is_grad_enabled() and any(one.requires_grad for one in parameters)
    if trained and layout.mesh.tp > 1:
        raise NotImplementedError(
            f"A call of {name} itself with gradients is not supported under tensor parallelism yet. Call it under "
            "torch.no_grad(); or make it part of the loss that compile_sharded is given."
        )
    if trained:
        return _Gathered.apply(layout, name, *parameters)  # type: ignore[no-any-return, no-untyped-call]
    with torch.no_grad():
        return _gathered(layout, name, parameters)


def _gathered(layout: Layout, name: str, parameters: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    with layout.meeting(f"a call of {name} itself"):
        return tuple(map(_whole, parameters))


def _whole(parameter: Any) -> torch.Tensor:
    place = _place_of(parameter)
    dtype = place.layout.plan.compute_dtype(place.buffer)
    if isinstance(parameter, WholeParameter):
        return parameter.detach().to(dtype)
    if parameter._sharded.whole or parameter._sharded.replay is not None:  # a computed tensor is in its place
        value = whole_of(parameter).to(place.layout.plan.device, dtype)
    else:
        value = place.gather(parameter.local.to(dtype)).to(place.layout.plan.device)
    mesh, tp = place.layout.mesh, place.leaf.tp
    if tp is None or mesh.tp_mesh is None:
        return value.contiguous() if place.leaf.split else value
    placement = Replicate() if tp.dim is None else Shard(tp.dim)
    part = value
    if tp.dim is not None:
        each, own = place.leaf.shape[tp.dim], tp.own(mesh.tp_rank)
        part = value.narrow(tp.dim, min(mesh.tp_rank * each, tp.shape[tp.dim]), own).contiguous()
    return DTensor.from_local(
        part, mesh.tp_mesh, (placement,), run_check=False, shape=value.shape, stride=contiguous_stride(value.shape)
    )


class _Gathered(torch.autograd.Function):
    """Parameters -> the whole ones; their gradients -> this rank's parts of the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, name: str, *parameters: Any) -> Any:
        ctx.layout, ctx.name = layout, name
        ctx.places = [_place_of(one) for one in parameters]
        ctx.set_materialize_grads(False)
        wholes = _gathered(layout, name, parameters)
        ctx.mark_non_differentiable(
            *(whole for whole, one in zip(wholes, parameters, strict=True) if not one.requires_grad)
        )
        return wholes

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        layout: Layout = ctx.layout
        plan, mesh = layout.plan, layout.mesh
        wanted = [place for place, needs in zip(ctx.places, ctx.needs_input_grad[2:], strict=True) if needs]
        with layout.meeting(f"the backward of a call of {ctx.name} itself"):
            flats = {}
            for buffer in dict.fromkeys(place.buffer for place in wanted):
                flat = torch.zeros(buffer.numel, dtype=plan.reduce_dtype(buffer), device=plan.device)
                for place, gradient in zip(ctx.places, gradients, strict=True):
                    if place.buffer is buffer and gradient is not None:
                        flat[place.slot.offset : place.slot.end].copy_(place.leaf.in_memory_order(gradient))
                mean = reduced_mean(flat, buffer, plan, mesh)
                if mean.numel() == buffer.numel and plan.placement.parameter:  # under zero1, all of it
                    mean = plan.own(mean, mesh.shard_rank, cut=True)
                flats[buffer.key] = mean
        found: list[torch.Tensor | None] = []
        for place, gradient in zip(ctx.places, gradients, strict=True):
            if gradient is None:
                found.append(None)
                continue
            own = flats[place.buffer.key].to(plan.state_device)
            found.append(gradient_at(place, own))
        return None, None, *found
