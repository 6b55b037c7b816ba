"""Compares each kernel with its reference on small data, on the device where it is to run, before it is trusted.

The data has what a call of the operator has: its dtypes, its numbers, the scalars that it is given; in sizes that
reach every branch of a kernel (a whole block, the end of one, one element, an address that is not aligned), and with an
infinity where values are counted. What the operator writes and returns is compared with `reference`'s, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_compiled.kernels import host_copies
from fsdp_compiled.kernels.operators import IMPLEMENTATIONS, RUNS

SIZES = (5000, 1, 33)  # elements; a block is 1,024 or 4,096
ROWS = 3  # of what is packed
SCALARS = {"lr": 1e-2, "step": 3.0, "factor": 0.5, "scheduled": 0.8, "scale": 0.5, "skipped": 0.0}
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-12}
FLOAT32 = 4e-6  # multiply-adds are contracted on a GPU, and sums of squares have another order


@dataclass(frozen=True)
class Like:
    """What of a call of an operator decides what its kernel compiles to.

    ``lists``: of each argument that is a list of tensors, their dtypes; lists that are walked together have as many.
    ``scalars``: of each that is a tensor, its dtype. ``numbers``: keyword arguments, and what else is no tensor.
    """

    name: str
    lists: tuple[tuple[str, tuple[torch.dtype, ...]], ...]
    scalars: tuple[tuple[str, torch.dtype], ...]
    numbers: tuple[tuple[str, Any], ...]


def failure(like: Like, device: torch.device) -> str:
    """How the operator fails there, or differs from its reference, in one line; empty where it does neither."""
    try:
        mine, expected = (_arguments(like, device) for _ in range(2))
        results = RUNS[like.name, device.type](*mine[0], **mine[1])
        wanted = IMPLEMENTATIONS[like.name](*expected[0], **expected[1])
        return _difference([*mine[0], results], [*expected[0], wanted])
    except Exception as error:  # whatever a compiler, a driver or a missing package raises
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _arguments(like: Like, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """The same in every call, on memory of its own."""
    generator = torch.Generator().manual_seed(0)
    lists, scalars, numbers = dict(like.lists), dict(like.scalars), dict(like.numbers)
    if like.name == "flatten_":  # a call may have none but what is there already
        lists.setdefault("gradients", (scalars["flat"],))
    flattens = like.name.startswith("flatten")
    gradients = _gradients(lists["gradients"], generator, device) if flattens else []
    room = [-(-one.numel() // 8) * 8 + 16 for one in gradients]
    made: dict[str, Callable[[], Any]] = {
        "values": lambda: _values(generator, scalars["values"], device),
        "packed": lambda: IMPLEMENTATIONS["pack"](
            _values(generator, torch.float32, device), ROWS, form=numbers["form"]
        ),
        "rows": lambda: ROWS,
        "salt": lambda: ROWS,
        "seed": lambda: torch.full((1,), 2**40 + 3, device=device) if "seed" in scalars else None,
        "offsets": lambda: [sum(room[:place]) for place in range(len(room))],
        "numel": lambda: {"unpack": SIZES[0], "combine": -(-SIZES[0] // ROWS)}.get(like.name, sum(room)),
        "kept": list,
        "dtype": lambda: numbers["dtype"],
        "flat": lambda: torch.full((sum(room),), 7.0, dtype=scalars["flat"], device=device),
    }
    if flattens:
        made["gradients"] = lambda: gradients
    overload = getattr(torch.ops.fsdp_compiled, like.name).default
    found: list[Any] = []
    for argument in overload._schema.arguments:
        name = argument.name
        if argument.kwarg_only:
            continue
        if name in made:
            found.append(made[name]())
        elif name in lists:
            found.append(_list(name, lists[name], generator, device))
        elif name in scalars:
            found.append(torch.tensor(SCALARS.get(name, 0.0), device=device).to(scalars[name]))
        else:
            found.append([] if "[]" in str(argument.type) or "List" in str(argument.type) else None)
    numbers.pop("dtype", None)
    return found, numbers


def _values(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of very different sizes, some of them zero, and a NaN."""
    values = torch.randn(SIZES[0], generator=generator) * torch.logspace(-9, 9, SIZES[0])
    values[1000:1200] = 0
    values[3000] = float("nan")
    return values.to(device, dtype)


def _list(name: str, dtypes: Sequence[torch.dtype], generator: torch.Generator, device: torch.device) -> list[Any]:
    """Flat tensors, three of each dtype; the last of them one element off an aligned address."""
    found = []
    for dtype in dtypes:
        for size in SIZES:
            values = torch.randn(size, generator=generator, dtype=torch.float64)
            values = values.abs() if "sq" in name else values
            room = torch.empty(size + 1, dtype=dtype, device=device)
            place = room[1:] if size == SIZES[-1] else room[:-1]
            found.append(place.copy_(values))
    return found


def _gradients(dtypes: Sequence[torch.dtype], generator: torch.Generator, device: torch.device) -> list[torch.Tensor]:
    """A flat one, a transposed one, one that shows one row many times, and a scalar, of each dtype."""
    found = []
    for dtype in dtypes:
        whole = torch.randn(80, 48, generator=generator).to(device, dtype)
        found += [whole.reshape(-1).clone(), whole.t(), whole[:1].expand(5, 48), whole[0, 0].clone()]
        found[-1].fill_(float("inf"))
    return found


def _difference(mine: Sequence[Any], expected: Sequence[Any]) -> str:
    for place, (left, right) in enumerate(zip(mine, expected, strict=True)):
        if isinstance(left, list | tuple):
            if said := _difference(left, right):
                return f"in list {place}, {said}"
        elif isinstance(left, torch.Tensor):
            rounding = ROUNDING.get(right.dtype, FLOAT32)
            if not torch.allclose(left.double(), right.double(), rtol=rounding, atol=rounding / 10, equal_nan=True):
                off = (left.double() - right.double()).abs().nan_to_num(nan=float("inf"))
                return f"tensor {place} is off by {float(off.max()):.3g}"
    return ""


def use_reference(name: str, device: torch.device) -> bool:
    """Puts the reference in the place of this operator's kernel on this kind of device; False if it was there."""
    if name == host_copies.NAME:
        return host_copies.use_order(device)
    before = RUNS[name, device.type]
    RUNS[name, device.type] = IMPLEMENTATIONS[name]
    return before is not IMPLEMENTATIONS[name]
