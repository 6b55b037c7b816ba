"""Captures on fake tensors of a plan's parameters, of the model's buffers and of a real batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.captured import Capture, Tensors, batch_tensors
from fsdp_compiled.capture.dynamic_shapes import Sizes, moving
from fsdp_compiled.capture.global_modes import GlobalModes
from fsdp_compiled.capture.layers_across_ranks import along_sequences, synchronised
from fsdp_compiled.capture.model_tensors import check_wrapped, is_wrapped, named_parameters, notes_on, wrapped_fake
from fsdp_compiled.capture.plain_way import capture
from fsdp_compiled.capture.refusals import check_attributes
from fsdp_compiled.capture.side_effects import inside
from fsdp_compiled.capture.tensor_parallel import parts_of
from fsdp_compiled.capture.user_errors import own_exception
from fsdp_compiled.ir.nodes import fake_tensor
from fsdp_compiled.plan.leaf import contiguous_stride
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.torch_private.names import find, uses


def capture_on(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    plan: Plan,
    buffers: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    gradient: bool,
    results: bool = False,
    plain: Mapping[str, torch.Tensor] | None = None,
    sizes: Sizes | None = None,
    hints: Sizes | None = None,
    modes: GlobalModes | None = None,
    tp_mesh: DeviceMesh | None = None,
    groups: dict[str, str] | None = None,
) -> Capture:
    """Runs `capture` on fake tensors that stand for the plan's parameters, the model's buffers and a real batch.

    ``plain``: the model's parameters that the plan does not have, by each of their names.

    ``sizes``: the dims of the batch's tensors that may change (see `dynamic_shapes`), and
    ``hints``: the sizes to trace them with. ``modes``: as for `capture`. ``tp_mesh``: the mesh of the DTensors, for
    parameters that are sharded along the tp axis. ``groups``: process groups by their names in programs (`name_axes`).
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    seen: dict[int, torch.Tensor] = {}

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in seen:
            seen[id(tensor)] = fake(tensor)
            seen[id(tensor)].__dict__.update(vars(tensor))
        return seen[id(tensor)]

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return fake_tensor(mode, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    parameters: dict[str, torch.Tensor] = {}
    own, device = dict(named_parameters(model)), plan.device
    for buffer in plan.buffers:
        dtype = plan.compute_dtype(buffer)
        for slot in buffer.slots:
            leaf = slot.leaf
            if (known := own.get(leaf.names[0])) is None:  # the unit's, but outside of the model that is called
                continue
            new = _parameter(fake_tensor(mode, leaf.shape, leaf.stride, dtype, device), gradient and leaf.trainable)
            new.__dict__.update(notes_on(known))  # models read these
            for name in leaf.names:
                parameters[name] = new
    whole: dict[str, torch.Tensor] = {}
    for name, parameter in (plain or {}).items():
        check_wrapped(name, parameter)
        if id(parameter) not in seen:
            new = wrapped_fake(parameter, fake) if is_wrapped(parameter) else fake_of(parameter)
            seen[id(parameter)] = _parameter(new, gradient and parameter.requires_grad)
        whole[name] = seen[id(parameter)]
    for place, tensor in {**batch_tensors(args, kwargs), **buffers}.items():
        if isinstance(tensor, DTensor):
            raise CaptureError(
                f"{'batch' if place.startswith('[') else 'buffer '}{place} is a DTensor. Pass a plain tensor, which "
                "all ranks along the tp axis have: tensor.full_tensor()."
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise CaptureError(
                f"{'batch' if place.startswith('[') else 'buffer '}{place} is a {kind} tensor, which cannot be traced. "
                "Pass the dense tensors that it is made of (values, indices, lengths)."
            )
    examples: dict[int, torch.Tensor] = {}  # one for a tensor that is given twice

    def example(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in examples:
            examples[id(tensor)] = _example(mode, tensor, sizes or {}, hints or {})
        return examples[id(tensor)]

    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, example, (args, dict(kwargs)))
    tensors = Tensors(parameters, {name: fake_of(tensor) for name, tensor in buffers.items()}, whole)
    with casting(inside(model), plan.policy.precision), synchronised(plan.axes), along_sequences(plan.axes):
        parts, refusal = parts_of(plan, tp_mesh), None
        try:
            made = capture(
                model, loss, tensors, fake_args, fake_kwargs, gradient=gradient, results=results, modes=modes,
                parts=parts, groups=groups,
            )  # fmt: skip
        except CaptureError as error:
            refusal = error
        if refusal is not None:
            given = pytree.tree_map_only(torch.Tensor, fake_of, (args, dict(kwargs)))  # in their own sizes
            raise own_exception(refusal, model, loss, tensors, *given, gradient=gradient, modes=modes) or refusal
    check_attributes(batch_tensors(args, kwargs), made.asked)
    return made


def _parameter(fake: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Makes ``isinstance(fake, nn.Parameter)`` true, for models that check it. `nn.Parameter` itself would make another
    tensor."""
    fake.requires_grad_(requires_grad)._is_param = True  # type: ignore[attr-defined]
    return fake  # type: ignore[return-value]


def _example(mode: FakeTensorMode, tensor: torch.Tensor, sizes: Sizes, hints: Sizes) -> torch.Tensor:
    """A fake tensor like this tensor of the batch. Dims that move get the size to trace with, and a mark for Dynamo."""
    dims = moving(tensor, sizes)
    shape = tuple(hints[dim] if dim in dims else size for dim, size in enumerate(tensor.shape))
    stride = contiguous_stride(shape) if dims and tensor.is_contiguous() else tensor.stride()
    fake = fake_tensor(mode, shape, stride, tensor.dtype, tensor.device)
    for dim in dims:
        if uses("moving sizes"):
            find("torch._dynamo.maybe_mark_dynamic")(fake, dim)
    return fake.requires_grad_(tensor.requires_grad)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The value with its floating-point tensors cast to this dtype."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


@contextlib.contextmanager
def casting(model: nn.Module, precision: MixedPrecisionPolicy) -> Iterator[None]:
    """Inside, casts the model's inputs and outputs, as FSDP2 does at its root module."""

    handles = []
    if precision.param_dtype is not None and precision.cast_forward_inputs:
        dtype = precision.param_dtype
        handles.append(
            model.register_forward_pre_hook(
                lambda _, args, kwargs: (cast(args, dtype), cast(kwargs, dtype)), with_kwargs=True
            )
        )
    if precision.output_dtype is not None:
        output = precision.output_dtype
        handles.append(model.register_forward_hook(lambda _, args, result: cast(result, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
