"""The update: AdamW and Adam on the shards, each element of each tensor read once and written once.

    before                                          after, in one launch for all shards

    gradient *= factor                              parameter, exp_avg, exp_avg_sq, copy =
    parameter *= 1 - lr * weight_decay                  adam(parameter, gradient * factor, exp_avg, exp_avg_sq)
    exp_avg.lerp_(gradient, 1 - beta1); ...
    copy = parameter.to(bfloat16)

The formulas are those of `torch.optim`'s fused kernels, in float32 (float64 where the parameter is). Clipping's factor,
rates, the step count, and whether the step is skipped (it overflowed), are read from 0-d tensors on the device, after
the shards' elements are asked for: so the two waits are one. Whether to skip masks the stores: a branch would take the
loads with it, and they would wait for it. No function here returns None: Triton 3.6 cannot compile one whose value is
used. An element of Adam's is one division: the correction of
the second moment, which divides each root in the formula, multiplies the rate and ``eps`` instead.

A launch works on eight tensors at most, in blocks of eight warps. Each address that a program may need is a register
while it searches for its own; with 32 tensors in five lists that were 109 of them, and 16 warps on a multiprocessor
(sm_90) in the place of 48.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fsdp_compiled.kernels.launch import Launch, located, of, pick, triton_dtype
from fsdp_compiled.kernels.layout import list_groups
from fsdp_compiled.kernels.reference import compute_dtype

BLOCK = 1024
WARPS = 8
TENSORS = 8  # of a launch


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
def _gradient(values, factor, MAXIMIZE: tl.constexpr, COMPUTE: tl.constexpr):
    if factor is not None:
        values = values * factor.to(COMPUTE)
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
    skipped,
    OPTIONS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    DECAY: tl.constexpr = get(OPTIONS, "weight_decay")
    value = tl.load(parameter, mask=inside).to(COMPUTE)
    slope = tl.load(gradient, mask=inside).to(COMPUTE)
    mean = tl.load(average, mask=inside).to(COMPUTE)
    energy = tl.load(square, mask=inside).to(COMPUTE)
    most = energy
    if largest is not None:
        most = tl.load(largest, mask=inside).to(COMPUTE)
    rate = tl.load(lr).to(COMPUTE)
    count = tl.load(step).to(COMPUTE)
    factor = None if factor is None else tl.load(factor)
    scheduled = None if scheduled is None else tl.load(scheduled)
    if skipped is not None:
        made = (tl.load(skipped) > 0) == 0
        written = made if inside is None else inside & made
    else:
        written = inside
    fresh1 = tl.full((), get(OPTIONS, "fresh1"), COMPUTE)
    log_beta1 = tl.full((), get(OPTIONS, "log_beta1"), COMPUTE)
    log_beta2 = tl.full((), get(OPTIONS, "log_beta2"), COMPUTE)
    if scheduled is not None:
        fresh1 = (1 - scheduled).to(COMPUTE)
        log_beta1 = tl.log(scheduled).to(COMPUTE)
    slope = _gradient(slope, factor, get(OPTIONS, "maximize"), COMPUTE)
    if DECAY != 0:
        if get(OPTIONS, "decoupled"):
            value -= rate * DECAY * value
        else:
            slope += DECAY * value
    mean += fresh1 * (slope - mean)
    energy = get(OPTIONS, "beta2") * energy + get(OPTIONS, "fresh2") * (slope * slope)
    _store(average, mean, written)
    _store(square, energy, written)
    if largest is not None:
        most = tl.maximum(most, energy, propagate_nan=tl.PropagateNan.ALL)
        _store(largest, most, written)
    else:
        most = energy
    correction1 = one_minus_exp(count * log_beta1, COMPUTE)
    correction2 = root(one_minus_exp(count * log_beta2, COMPUTE), COMPUTE)
    below = root(most, COMPUTE) + get(OPTIONS, "eps") * correction2
    value -= ratio(ratio(rate, correction1, COMPUTE) * correction2 * mean, below, COMPUTE)
    _store(parameter, value, written)
    if copy is not None:
        _store(copy, value.to(parameter.dtype.scalar.element_ty), written)


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
        _adam(p, g, a, s, m, c, None, lr, step, factor, scheduled, skipped, OPTIONS, COMPUTE)
    else:
        _adam(p, g, a, s, m, c, places < size, lr, step, factor, scheduled, skipped, OPTIONS, COMPUTE)


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
    **numbers: Any,
) -> list[Launch]:
    """One launch for each `TENSORS` of a set of dtypes; a list that is empty is not there."""
    lists = {
        "parameters": parameters,
        "gradients": gradients,
        "averages": exp_avgs,
        "squares": exp_avg_sqs,
        "largest": max_exp_avg_sqs,
        "copies": copies,
    }
    scalars = {"lr": lr, "step": step, "factor": factor, "scheduled": scheduled, "skipped": skipped}
    found = []
    for places, group in list_groups(*lists.values(), block=BLOCK, most=TENSORS):
        chosen = {name: tuple(tensors[i] for i in places) if tensors else None for name, tensors in lists.items()}
        constants = {
            "GROUPS": (group,),
            "OPTIONS": _options(**numbers),
            "BLOCK": BLOCK,
            "COMPUTE": triton_dtype(compute_dtype(parameters[places[0]])),
        }
        found.append(Launch(_adam_kernel, group.starts[-1], {**chosen, **scalars, **constants}, WARPS))
    return found


def _options(beta1: float, beta2: float, **numbers: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers as the kernel gets them; differences of numbers near one are taken here, in float64."""
    logs = {f"log_beta{n}": math.log(beta) if beta else -1e4 for n, beta in ((1, beta1), (2, beta2))}
    return tuple({"beta2": beta2, "fresh1": 1 - beta1, "fresh2": 1 - beta2, **logs, **numbers}.items())


def adam(*arguments: Any, **numbers: Any) -> None:
    """As `fsdp_compiled.kernels.reference.adam`."""
    for launch in adam_launches(*arguments, **numbers):
        launch.run(launch.arguments["lr"].device)
