"""What each kernel computes, in plain PyTorch: the oracle of its tests, and what runs on a CPU.

Numbers are worked out in float32, in float64 where a tensor is, and rounded once, where they are stored. Scales, rates
and counts are 0-d tensors: nothing reads them on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_compiled.kernels.layout import ceil_div
from fsdp_compiled.kernels.options import SGD, Adam

SQUARES = 4096  # elements whose squares `measure` adds up into one number


def compute_dtype(*tensors: torch.Tensor | torch.dtype) -> torch.dtype:
    dtypes = [item if isinstance(item, torch.dtype) else item.dtype for item in tensors]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _count(values: torch.Tensor, nonfinite: torch.Tensor | None) -> None:
    if nonfinite is not None:
        nonfinite += values.isfinite().logical_not().sum()


def flatten(
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
) -> torch.Tensor:
    """``flat[offset : offset + n] = scale * gradient``, zero elsewhere; values that are not finite are counted."""
    flat = gradients[0].new_zeros(numel, dtype=dtype)
    for gradient, offset in zip(gradients, offsets, strict=True):
        values = gradient.reshape(-1)
        if scale is not None:
            compute = compute_dtype(gradient, dtype)
            values = values.to(compute) * scale.to(compute)
        flat[offset : offset + gradient.numel()].copy_(values)
    _count(flat, nonfinite)
    return flat


def flatten_into(
    flat: torch.Tensor, gradients: Sequence[torch.Tensor], offsets: Sequence[int], kept: Sequence[int]
) -> None:
    """``flat[offset : offset + n] = gradient``, zero elsewhere, but for the stretches of ``flat`` that are ``kept``.

    ``kept``: the first and the last + 1 of each stretch.
    """
    taken = [(offset, offset + gradient.numel()) for gradient, offset in zip(gradients, offsets, strict=True)]
    taken = sorted([*taken, *zip(kept[::2], kept[1::2], strict=True)])
    for (_, end), (start, _) in zip([(0, 0), *taken], [*taken, (flat.numel(), 0)], strict=True):
        flat[end:start].zero_()
    for gradient, offset in zip(gradients, offsets, strict=True):
        flat[offset : offset + gradient.numel()].copy_(gradient.reshape(-1))


def accumulate(
    totals: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    scale: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
) -> torch.Tensor:
    """``total += part``, and then the totals are measured as `measure` does."""
    for total, part in zip(totals, parts, strict=True):
        compute = compute_dtype(total, part)
        total.copy_(total.to(compute) + part.to(compute))
    return measure(totals, scale, nonfinite)


def measure(
    parts: Sequence[torch.Tensor], scale: torch.Tensor | None = None, nonfinite: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of the squares of ``scale * part``, for each `SQUARES` elements of each part, for the caller to add up.

    How many elements, before they are scaled, are not finite is added to ``nonfinite``.
    """
    dtype = compute_dtype(*parts)
    squares = [torch.zeros(0, dtype=dtype, device=parts[0].device)]
    for part in parts:
        _count(part, nonfinite)
        compute = compute_dtype(part)
        values = part.to(compute)
        if scale is not None:
            values = values * scale.to(compute)
        padded = torch.nn.functional.pad(values, (0, -part.numel() % SQUARES)).view(-1, SQUARES)
        squares.append((padded * padded).sum(1).to(dtype))
    return torch.cat(squares)


def squares_of(parts: Sequence[torch.Tensor]) -> int:
    """How many sums of squares `measure` returns."""
    return sum(ceil_div(part.numel(), SQUARES) for part in parts)


def adam(
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
) -> None:
    """`torch.optim.Adam` or `AdamW` at a ``step`` that counts from 1.

    ``factor`` scales the gradients (clipping), ``scheduled`` takes the place of the options' ``beta1``,
    ``max_exp_avg_sqs`` may be empty (no AMSGrad), and ``copies``, if there are any, receive the parameters in their
    own dtype. Where ``skipped`` is more than 0 nothing is written.
    """
    beta1 = torch.full_like(step, options.beta1, dtype=torch.float64) if scheduled is None else scheduled.double()
    correction1 = 1 - beta1 ** step.double()
    correction2 = (1 - options.beta2 ** step.double()).sqrt()
    for index, parameter in enumerate(parameters):
        compute = compute_dtype(parameter)
        value, average, square = (tensor.to(compute) for tensor in (parameter, exp_avgs[index], exp_avg_sqs[index]))
        gradient = _gradient(gradients[index], compute, factor, options.maximize)
        if options.weight_decay and options.decoupled:
            value = value - (lr * options.weight_decay).to(compute) * value
        elif options.weight_decay:
            gradient = gradient + options.weight_decay * value
        average = average + (1 - beta1).to(compute) * (gradient - average)
        square = options.beta2 * square + options.fresh2 * (gradient * gradient)
        largest = square
        if max_exp_avg_sqs:
            largest = torch.maximum(max_exp_avg_sqs[index].to(compute), square)
            _write(max_exp_avg_sqs[index], largest, skipped)
        value = value - (lr / correction1).to(compute) * average / (
            largest.sqrt() / correction2.to(compute) + options.eps
        )
        _write(exp_avgs[index], average, skipped)
        _write(exp_avg_sqs[index], square, skipped)
        _write(parameter, value, skipped)
        if copies:
            _write(copies[index], parameter, skipped)


def sgd(
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
) -> None:
    """`torch.optim.SGD`; ``buffers`` (of zeros at first) are there exactly if it has momentum.

    ``undamped`` is 1 on the first step, which takes the gradient whole, and 0 afterwards; ``scheduled`` takes
    the place of the options' ``momentum``; ``factor``, ``copies`` and ``skipped`` are as in `adam`.
    """
    for index, parameter in enumerate(parameters):
        compute = compute_dtype(parameter)
        value = parameter.to(compute)
        gradient = _gradient(gradients[index], compute, factor, options.maximize)
        if options.weight_decay:
            gradient = gradient + options.weight_decay * value
        if buffers:
            rate = scheduled.to(compute) if scheduled is not None else options.momentum
            damp = options.dampening if undamped is None else options.dampening * (1 - undamped.to(compute))
            buffer = rate * buffers[index].to(compute) + (1 - damp) * gradient
            _write(buffers[index], buffer, skipped)
            gradient = gradient + rate * buffer if options.nesterov else buffer
        value = value - lr.to(compute) * gradient
        _write(parameter, value, skipped)
        if copies:
            _write(copies[index], parameter, skipped)


def _write(target: torch.Tensor, value: torch.Tensor, skipped: torch.Tensor | None) -> None:
    target.copy_(value if skipped is None else torch.where(skipped > 0, target, value.to(target.dtype)))


def _gradient(
    gradient: torch.Tensor, compute: torch.dtype, factor: torch.Tensor | None, maximize: bool
) -> torch.Tensor:
    value = gradient.to(compute)
    if factor is not None:
        value = value * factor.to(compute)
    return -value if maximize else value
