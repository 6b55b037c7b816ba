"""What each kernel computes, in plain PyTorch: the oracle of its tests, and what runs on a CPU.

Numbers are worked out in float32, in float64 where a tensor is, and rounded once, where they are stored. Scales, rates
and counts are 0-d tensors: nothing reads them on the host. The numbers that an update depends on besides
are constants of the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_compiled.kernels.layout import ceil_div

SQUARES = 4096  # elements whose squares `measure` adds up into one number
SCALED = 128  # elements that have a scale in common, where they are packed
ROW = 512  # elements that a packed row is a multiple of: its scales then end at an address for the widest accesses
PIECE = 2**16  # elements that are packed or unpacked at a time: what is worked out on the way stays in the cache
LARGEST = {"int8": 127.0, "fp8": 448.0}  # of the formats; fp8 is torch.float8_e4m3fn
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))  # of `noise`
STEP = 0x9E3779B9 - 2**32  # 2^32 by the golden ratio


def compute_dtype(*tensors: torch.Tensor | torch.dtype) -> torch.dtype:
    dtypes = [item if isinstance(item, torch.dtype) else item.dtype for item in tensors]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def flatten(
    gradients: Sequence[torch.Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``flat[offset : offset + n] = scale * gradient``, zero elsewhere."""
    flat = gradients[0].new_zeros(numel, dtype=dtype)
    for gradient, offset in zip(gradients, offsets, strict=True):
        values = gradient.reshape(-1)
        if scale is not None:
            compute = compute_dtype(gradient, dtype)
            values = values.to(compute) * scale.to(compute)
        flat[offset : offset + gradient.numel()].copy_(values)
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
        if nonfinite is not None:
            nonfinite += part.isfinite().logical_not().sum()
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
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """`torch.optim.Adam`, or `AdamW` where the weight decay is ``decoupled``, at a ``step`` that counts from 1.

    ``factor`` scales the gradients (clipping), ``scheduled`` takes the place of ``beta1``,
    ``max_exp_avg_sqs`` may be empty (no AMSGrad), and ``copies``, if there are any, receive the parameters in their
    own dtype. Where ``skipped`` is more than 0 nothing is written.
    """
    first = torch.full_like(step, beta1, dtype=torch.float64) if scheduled is None else scheduled.double()
    correction1 = 1 - first ** step.double()
    correction2 = (1 - beta2 ** step.double()).sqrt()
    for index, parameter in enumerate(parameters):
        compute = compute_dtype(parameter)
        value, average, square = (tensor.to(compute) for tensor in (parameter, exp_avgs[index], exp_avg_sqs[index]))
        gradient = _gradient(gradients[index], compute, factor, maximize)
        if weight_decay and decoupled:
            value = value - (lr * weight_decay).to(compute) * value
        elif weight_decay:
            gradient = gradient + weight_decay * value
        average = average + (1 - first).to(compute) * (gradient - average)
        square = beta2 * square + (1 - beta2) * (gradient * gradient)
        largest = square
        if max_exp_avg_sqs:
            largest = torch.maximum(max_exp_avg_sqs[index].to(compute), square)
            _write(max_exp_avg_sqs[index], largest, skipped)
        value = value - (lr / correction1).to(compute) * average / (largest.sqrt() / correction2.to(compute) + eps)
        _write(exp_avgs[index], average, skipped)
        _write(exp_avg_sqs[index], square, skipped)
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


def row_of(numel: int, rows: int) -> tuple[int, int]:
    """Of so many elements in so many rows: how many a row has, and how many bytes it takes when it is packed."""
    row = ceil_div(numel, rows)
    length = ceil_div(row, ROW) * ROW
    return row, length + length // SCALED * 4


def pack(
    values: torch.Tensor, rows: int, seed: torch.Tensor | None = None, salt: int = 0, *, form: str
) -> torch.Tensor:
    """``[numel]`` -> bytes: ``rows`` rows, the last of which may have less, each with a byte for each element, zeros up
    to a multiple of `ROW`, and a float32 scale for each `SCALED` elements, their largest size over ``LARGEST[form]``.

    An element becomes the number of the format below, or above, ``value / scale``; the nearer one, or, with a ``seed``,
    an int64 scalar, either one, by `noise`, so that on average it is the value itself. Where a scale is not finite, all
    that comes out of it is NaN.
    """
    row, size = row_of(values.numel(), rows)
    packed = values.new_zeros(rows, size, dtype=torch.uint8)
    length = size // (SCALED + 4) * SCALED
    for number in range(rows):
        codes, scales = packed[number, :length], packed[number, length:].view(torch.float32)
        start, stop = number * row, min((number + 1) * row, values.numel())
        for first in range(start, stop, PIECE):
            last = min(first + PIECE, stop)
            place = slice(first - start, first - start + ceil_div(last - first, SCALED) * SCALED)
            piece = torch.nn.functional.pad(values[first:last].float(), (0, place.stop - place.start - last + first))
            blocks = piece.view(-1, SCALED)
            largest = blocks.abs().amax(1).nan_to_num_(nan=torch.inf, posinf=torch.inf)
            scale = largest.div_(LARGEST[form])
            scales[place.start // SCALED : place.stop // SCALED] = scale
            blocks.div_(scale.masked_fill(scale == 0, torch.inf)[:, None]).nan_to_num_(nan=0.0)
            _round(piece, 0.5 if seed is None else noise(first, piece.numel(), seed, salt), form)
            kind = torch.int8 if form == "int8" else torch.float8_e4m3fn
            codes[place] = piece.to(kind).view(torch.uint8)
    return packed.view(-1)


def _round(values: torch.Tensor, up: torch.Tensor | float, form: str) -> None:
    """In place: the number of the format below ``value + up`` of its distance to the one above."""
    step: torch.Tensor | float = 1.0
    if form == "fp8":  # three bits behind the first one; below 2^-6 they are as far apart as there
        exponent = values.view(torch.int32).bitwise_right_shift(23).bitwise_and_(255).clamp_(min=121)
        step = exponent.sub_(3).bitwise_left_shift_(23).view(torch.float32)
    values.div_(step).add_(up).floor_().mul_(step).clamp_(-LARGEST[form], LARGEST[form])


def noise(first: int, numel: int, seed: torch.Tensor, salt: int) -> torch.Tensor:
    """Uniform in [0, 1), for the places ``first``, ``first + 1``, ...: a hash of the place, the seed and the salt.

    The hash is lowbias32 of Chris Wellons' hash-prospector, which works on 32 bits.
    """
    seed = seed.reshape(1)
    key = _mixed((seed & 0xFFFFFFFF).add_(salt).to(torch.int32))
    key = _mixed(key ^ (seed >> 32).to(torch.int32))
    place = torch.arange(numel, dtype=torch.int32, device=seed.device).add_(_signed(first)).mul_(STEP).add_(key)
    return _mixed(place).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def _signed(value: int) -> int:
    """The same 32 bits as a signed number."""
    return (value + 2**31) % 2**32 - 2**31


def _mixed(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in MIX:
        x = _folded(x, shift).mul_(factor)
    return _folded(x, 16)


def _folded(x: torch.Tensor, shift: int) -> torch.Tensor:
    """``x ^= x >> shift``, in place, of int32 as bits."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def unpack(packed: torch.Tensor, rows: int, numel: int, dtype: torch.dtype, *, form: str) -> torch.Tensor:
    """``[numel]``: what `pack` made bytes of, rounded."""
    row, size = row_of(numel, rows)
    values = torch.empty(numel, dtype=dtype, device=packed.device)
    for number, one in enumerate(packed.view(rows, size)):
        start, stop = number * row, min((number + 1) * row, numel)
        for first in range(start, stop, PIECE):
            last = min(first + PIECE, stop)
            values[first:last] = _read(one, first - start, last - start, form)
    return values


def combine(packed: torch.Tensor, rows: int, numel: int, dtype: torch.dtype, *, form: str, mean: bool) -> torch.Tensor:
    """``[numel]``: the sum, or the mean, of ``rows`` packed rows of so many elements each, added up in float32."""
    values = torch.empty(numel, dtype=dtype, device=packed.device)
    others = packed.view(rows, -1)
    for first in range(0, numel, PIECE):
        last = min(first + PIECE, numel)
        total = _read(others[0], first, last, form)
        for one in others[1:]:
            total.add_(_read(one, first, last, form))
        values[first:last] = total.div_(rows) if mean else total
    return values


def _read(row: torch.Tensor, first: int, last: int, form: str) -> torch.Tensor:
    """Float32: these elements of one packed row; the first is the first of its scale."""
    length = row.numel() // (SCALED + 4) * SCALED
    stop = first + ceil_div(last - first, SCALED) * SCALED
    codes = row[first:stop].view(torch.int8 if form == "int8" else torch.float8_e4m3fn)
    scales = row[length:].view(torch.float32)[first // SCALED : stop // SCALED]
    return codes.float().view(-1, SCALED).mul_(scales[:, None]).view(-1)[: last - first]
