"""The update: AdamW, Adam and SGD on the shards, each element of each tensor read once and written once.

    before                                          after, in one launch for all shards

    gradient *= factor                              parameter, exp_avg, exp_avg_sq, copy =
    parameter *= 1 - lr * weight_decay                  adam(parameter, gradient * factor, exp_avg, exp_avg_sq)
    exp_avg.lerp_(gradient, 1 - beta1); ...
    copy = parameter.to(bfloat16)

The formulas are those of `torch.optim`'s fused kernels, in float32 (float64 where the parameter is). Clipping's factor,
rates, the step count, and whether the step is skipped (it overflowed), are read from 0-d tensors on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fsdp_compiled.kernels.launch import Launch, located, of, pick, triton_dtype
from fsdp_compiled.kernels.layout import by_dtype, list_group
from fsdp_compiled.kernels.options import SGD, Adam
from fsdp_compiled.kernels.reference import compute_dtype

BLOCK = 1024


@triton.jit
def one_minus_exp(x, COMPUTE: tl.constexpr):
    """``1 - exp(x)`` for ``x <= 0``, to the last bits: ``1 - beta ** step`` loses most of them in float32."""
    if tl.float64 == COMPUTE:
        return 1 - tl.exp(x)
    near = x / 9 + 1
    for back in tl.static_range(7):  # 1 + x/2 (1 + x/3 (1 + ... x/9)): within 1e-9 for x > -0.5
        near = near * x / (8 - back) + 1
    return tl.where(x > -0.5, -x * near, 1 - tl.exp(x))


@triton.jit
def root(x, COMPUTE: tl.constexpr):
    return tl.sqrt(x) if tl.float64 == COMPUTE else tl.sqrt_rn(x)


@triton.jit
def ratio(x, y, COMPUTE: tl.constexpr):
    return x / y if tl.float64 == COMPUTE else tl.div_rn(x, y)


@triton.jit
def _gradient(pointers, inside, factor, MAXIMIZE: tl.constexpr, COMPUTE: tl.constexpr):
    values = tl.load(pointers, mask=inside).to(COMPUTE)
    if factor is not None:
        values = values * tl.load(factor).to(COMPUTE)
    return -values if MAXIMIZE else values


@triton.jit
def _store(pointers, values, inside):
    tl.store(pointers, values.to(pointers.dtype.scalar.element_ty), mask=inside)


@triton.constexpr_function
def get(options, name):
    return dict(options)[name]


@triton.jit
def _adam(
    parameter,
    gradient,
    average,
    square,
    largest,
    copy,
    inside,
    lr,
    step,
    factor,
    scheduled,
    OPTIONS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    DECAY: tl.constexpr = get(OPTIONS, "weight_decay")
    rate = tl.load(lr).to(COMPUTE)
    count = tl.load(step).to(COMPUTE)
    fresh1 = tl.full((), get(OPTIONS, "fresh1"), COMPUTE)
    log_beta1 = tl.full((), get(OPTIONS, "log_beta1"), COMPUTE)
    log_beta2 = tl.full((), get(OPTIONS, "log_beta2"), COMPUTE)
    if scheduled is not None:
        fresh1 = (1 - tl.load(scheduled)).to(COMPUTE)
        log_beta1 = tl.log(tl.load(scheduled)).to(COMPUTE)
    correction1 = one_minus_exp(count * log_beta1, COMPUTE)
    correction2 = root(one_minus_exp(count * log_beta2, COMPUTE), COMPUTE)
    value = tl.load(parameter, mask=inside).to(COMPUTE)
    slope = _gradient(gradient, inside, factor, get(OPTIONS, "maximize"), COMPUTE)
    if DECAY != 0:
        if get(OPTIONS, "decoupled"):
            value -= rate * DECAY * value
        else:
            slope += DECAY * value
    mean = tl.load(average, mask=inside).to(COMPUTE)
    mean += fresh1 * (slope - mean)
    energy = tl.load(square, mask=inside).to(COMPUTE)
    energy = get(OPTIONS, "beta2") * energy + get(OPTIONS, "fresh2") * (slope * slope)
    _store(average, mean, inside)
    _store(square, energy, inside)
    if largest is not None:
        energy = tl.maximum(tl.load(largest, mask=inside).to(COMPUTE), energy, propagate_nan=tl.PropagateNan.ALL)
        _store(largest, energy, inside)
    below = ratio(root(energy, COMPUTE), correction2, COMPUTE) + get(OPTIONS, "eps")
    value -= ratio(ratio(rate, correction1, COMPUTE) * mean, below, COMPUTE)
    _store(parameter, value, inside)
    if copy is not None:
        _store(copy, value.to(parameter.dtype.scalar.element_ty), inside)


@triton.jit
def _adam_kernel(
    parameters,
    gradients,
    averages,
    squares,
    largest,
    copies,
    lr,
    step,
    factor,
    scheduled,
    skipped,
    GROUPS: tl.constexpr,
    OPTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    if skipped is not None:
        if tl.load(skipped) > 0:
            return
    program = tl.program_id(0)
    STARTS: tl.constexpr = of(GROUPS, 0, "starts")
    begin, _, size, _ = located(GROUPS, 0, program, BLOCK)
    places = begin + tl.arange(0, BLOCK)
    COUNT: tl.constexpr = of(GROUPS, 0, "count")
    p = pick(parameters, STARTS, program, 0, COUNT) + places
    g = pick(gradients, STARTS, program, 0, COUNT) + places
    a = pick(averages, STARTS, program, 0, COUNT) + places
    s = pick(squares, STARTS, program, 0, COUNT) + places
    m = None
    if largest is not None:
        m = pick(largest, STARTS, program, 0, COUNT) + places
    c = None
    if copies is not None:
        c = pick(copies, STARTS, program, 0, COUNT) + places
    if begin + BLOCK <= size:
        _adam(p, g, a, s, m, c, None, lr, step, factor, scheduled, OPTIONS, COMPUTE)
    else:
        _adam(p, g, a, s, m, c, places < size, lr, step, factor, scheduled, OPTIONS, COMPUTE)


@triton.jit
def _sgd(
    parameter,
    gradient,
    buffer,
    copy,
    inside,
    lr,
    undamped,
    factor,
    scheduled,
    OPTIONS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    DECAY: tl.constexpr = get(OPTIONS, "weight_decay")
    value = tl.load(parameter, mask=inside).to(COMPUTE)
    slope = _gradient(gradient, inside, factor, get(OPTIONS, "maximize"), COMPUTE)
    if DECAY != 0:
        slope += DECAY * value
    if buffer is not None:
        keep = tl.full((), get(OPTIONS, "momentum"), COMPUTE)
        if scheduled is not None:
            keep = tl.load(scheduled).to(COMPUTE)
        damp = tl.full((), get(OPTIONS, "dampening"), COMPUTE)
        if undamped is not None:
            damp *= 1 - tl.load(undamped).to(COMPUTE)
        velocity = keep * tl.load(buffer, mask=inside).to(COMPUTE) + (1 - damp) * slope
        _store(buffer, velocity, inside)
        if get(OPTIONS, "nesterov"):
            slope += keep * velocity
        else:
            slope = velocity
    value -= tl.load(lr).to(COMPUTE) * slope
    _store(parameter, value, inside)
    if copy is not None:
        _store(copy, value.to(parameter.dtype.scalar.element_ty), inside)


@triton.jit
def _sgd_kernel(
    parameters,
    gradients,
    buffers,
    copies,
    lr,
    undamped,
    factor,
    scheduled,
    skipped,
    GROUPS: tl.constexpr,
    OPTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    if skipped is not None:
        if tl.load(skipped) > 0:
            return
    program = tl.program_id(0)
    STARTS: tl.constexpr = of(GROUPS, 0, "starts")
    begin, _, size, _ = located(GROUPS, 0, program, BLOCK)
    places = begin + tl.arange(0, BLOCK)
    COUNT: tl.constexpr = of(GROUPS, 0, "count")
    p = pick(parameters, STARTS, program, 0, COUNT) + places
    g = pick(gradients, STARTS, program, 0, COUNT) + places
    b = None
    if buffers is not None:
        b = pick(buffers, STARTS, program, 0, COUNT) + places
    c = None
    if copies is not None:
        c = pick(copies, STARTS, program, 0, COUNT) + places
    if begin + BLOCK <= size:
        _sgd(p, g, b, c, None, lr, undamped, factor, scheduled, OPTIONS, COMPUTE)
    else:
        _sgd(p, g, b, c, places < size, lr, undamped, factor, scheduled, OPTIONS, COMPUTE)


def _launches(
    kernel: Any, lists: Mapping[str, Sequence[torch.Tensor]], scalars: Mapping[str, Any], options: Any
) -> list[Launch]:
    """One launch for each set of dtypes; a list that is empty is not there."""
    found = []
    for places in by_dtype(*lists.values()):
        parameters = [lists["parameters"][i] for i in places]
        group = list_group([parameter.numel() for parameter in parameters], BLOCK)
        chosen = {name: tuple(tensors[i] for i in places) if tensors else None for name, tensors in lists.items()}
        constants = {
            "GROUPS": (group,),
            "OPTIONS": options,
            "BLOCK": BLOCK,
            "COMPUTE": triton_dtype(compute_dtype(parameters[0])),
        }
        found.append(Launch(kernel, group.starts[-1], {**chosen, **scalars, **constants}))
    return found


def adam_launches(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor],
    lr: torch.Tensor,
    step: torch.Tensor,
    factor: torch.Tensor | None = None,
    scheduled: torch.Tensor | None = None,
    skipped: torch.Tensor | None = None,
    *,
    options: Adam,
) -> list[Launch]:
    lists = {
        "parameters": parameters,
        "gradients": gradients,
        "averages": exp_avgs,
        "squares": exp_avg_sqs,
        "largest": max_exp_avg_sqs,
        "copies": copies,
    }
    scalars = {"lr": lr, "step": step, "factor": factor, "scheduled": scheduled, "skipped": skipped}
    return _launches(_adam_kernel, lists, scalars, options)


def sgd_launches(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor],
    lr: torch.Tensor,
    undamped: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    scheduled: torch.Tensor | None = None,
    skipped: torch.Tensor | None = None,
    *,
    options: SGD,
) -> list[Launch]:
    lists = {"parameters": parameters, "gradients": gradients, "buffers": buffers, "copies": copies}
    scalars = {"lr": lr, "undamped": undamped, "factor": factor, "scheduled": scheduled, "skipped": skipped}
    return _launches(_sgd_kernel, lists, scalars, options)


def adam(*arguments: Any, options: Adam) -> None:
    """As `fsdp_compiled.kernels.reference.adam`."""
    for launch in adam_launches(*arguments, options=options):
        launch.run(launch.arguments["lr"].device)


def sgd(*arguments: Any, options: SGD) -> None:
    """As `fsdp_compiled.kernels.reference.sgd`."""
    for launch in sgd_launches(*arguments, options=options):
        launch.run(launch.arguments["lr"].device)
