"""What the kernels are compared on, wherever they run: in Triton's interpreter, on a GPU.

Each ``compare_...`` builds its tensors on a device, runs a kernel and its reference on copies, and raises where they
differ. What a kernel writes lies in memory filled with NaN, between guards that must stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from fsdp_compiled.kernels import accumulate, flatten, reference, update
from fsdp_compiled.kernels.trial import Like

GUARD = 64  # elements on either side of what a kernel may write
LAYOUTS = ("contiguous", "permuted", "expanded", "sliced", "misaligned")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (float("nan"), float("inf"), -float("inf"))
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "maximize": False}


@dataclass(frozen=True)
class Gradient:
    """How to make one: its dims are ``shape``, permuted, repeated with stride 0, or cut out of something wider."""

    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    specials: int  # how many of its elements are NaN or infinite

    def make(self, generator: torch.Generator, device: str) -> torch.Tensor:
        def fill(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator).to(self.dtype)
            flat = values.view(-1)
            for index in range(min(self.specials, flat.numel())):
                flat[index * 7 % flat.numel()] = SPECIAL[index % 3]
            return values.to(device)

        if self.layout == "permuted":
            return fill(*reversed(self.shape)).permute(list(reversed(range(len(self.shape)))))
        if self.layout == "expanded" and self.shape:
            return fill(1, *self.shape[1:]).expand(self.shape)
        if self.layout == "sliced" and self.shape:
            return fill(*self.shape[:-1], 2 * self.shape[-1])[..., ::2]
        if self.layout == "misaligned":
            size = torch.Size(self.shape).numel()
            return fill(size + 1)[1:].view(self.shape)
        return fill(*self.shape)


gradients = st.builds(
    Gradient,
    shape=st.one_of(
        st.tuples(st.integers(0, 9000)),
        st.tuples(st.integers(0, 80), st.integers(1, 80)),
        st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
        st.just(()),
    ),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    specials=st.sampled_from((0, 0, 1, 5)),
)
units = st.lists(gradients, min_size=1, max_size=5)
sizes = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 9000)), min_size=1, max_size=4)
# What `compare_flatten` and `compare_accumulate` are given.
flattens: dict[str, st.SearchStrategy[Any]] = {
    "unit": units,
    "gaps": st.lists(st.sampled_from((0, 0, 1, 8, 64, 5000)), min_size=6, max_size=6),
    "dtype": st.sampled_from(DTYPES),
    "scale": st.sampled_from((None, 1.0, 0.3, float("inf"))),
}
flattens_into = {name: flattens[name] for name in ("unit", "gaps", "dtype")} | {
    "there": st.lists(st.booleans(), min_size=5, max_size=5)
}
accumulates: dict[str, st.SearchStrategy[Any]] = {
    "lengths": sizes,
    "dtypes": st.tuples(st.sampled_from((torch.float32, torch.float64)), st.sampled_from(DTYPES)),
    "scale": st.sampled_from((None, 0.25, float("inf"))),
    "alone": st.booleans(),
    "specials": st.sampled_from((0, 2)),
}


def poisoned(numel: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of NaN, and what it was cut out of, with a guard on either side."""
    whole = torch.full((numel + 2 * GUARD,), 7.0, dtype=dtype, device=device)
    inner = whole[GUARD : GUARD + numel]
    inner.fill_(float("nan"))
    return inner, whole


def check_guards(whole: torch.Tensor) -> None:
    assert (whole[:GUARD] == 7).all() and (whole[-GUARD:] == 7).all(), "written outside of the output"


def same(mine: torch.Tensor, expected: torch.Tensor, exact: bool, rtol: float = 2e-6) -> None:
    """Bit for bit but for the sign and payload of NaN; or, in float32, to rounding, and to one unit in a half type."""
    if not exact:
        rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(expected.dtype, rtol)
    torch.testing.assert_close(
        mine, expected, rtol=0 if exact else rtol, atol=0 if exact else 1e-7, equal_nan=True, check_device=False
    )


def laid_out(tensors: Sequence[torch.Tensor], gaps: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Where each begins and ends in a flat buffer, with a gap before each and the last one behind, and its size."""
    places, end = [], 0
    for tensor, gap in zip(tensors, gaps, strict=False):
        places.append((end + gap, end + gap + tensor.numel()))
        end = places[-1][1]
    return places, end + gaps[-1]


def compare_flatten(
    unit: Sequence[Gradient],
    gaps: Sequence[int],
    dtype: torch.dtype,
    scale: float | None,
    device: str,
    *,
    seed: int = 0,
    rounds: bool = True,
    damage: Callable[[list[torch.Tensor]], list[torch.Tensor]] = lambda tensors: tensors,
) -> None:
    """``gaps[i]`` elements are left free before gradient ``i`` and ``gaps[-1]`` at the end. ``rounds``: whether the
    device rounds to the nearest bfloat16. ``damage``: what the kernel gets instead of the gradients, as a control."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [gradient.make(generator, device) for gradient in unit]
    places, numel = laid_out(tensors, gaps)
    offsets = [start for start, _ in places]
    factor = None if scale is None else torch.tensor(scale, device=device)
    out, whole = poisoned(numel, dtype, device)
    for launch in flatten.launches(out, damage(tensors), offsets, factor):
        launch.run(out.device)
    expected = reference.flatten(tensors, offsets, numel, dtype, factor)
    same(out, expected, exact=rounds or dtype != torch.bfloat16)
    check_guards(whole)


def compare_flatten_into(
    unit: Sequence[Gradient], gaps: Sequence[int], dtype: torch.dtype, there: Sequence[bool], device: str,
    *, seed: int = 0, rounds: bool = True, wiped: bool = False,
) -> None:  # fmt: skip
    """As `compare_flatten`, where the gradients that are ``there`` are in the buffer already. ``wiped``: it is not said
    that they are, as a control."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [gradient.make(generator, device) for gradient in unit]
    places, numel = laid_out(tensors, gaps)
    expected = reference.flatten(tensors, [start for start, _ in places], numel, dtype)
    out, whole = poisoned(numel, dtype, device)
    own = out.clone()
    rest, kept = [], []
    for tensor, (start, stop), known in zip(tensors, places, there, strict=False):
        if known:
            out[start:stop] = own[start:stop] = expected[start:stop]
            kept += [start, stop]
        else:
            rest.append((tensor, start))
    arguments = [tensor for tensor, _ in rest], [start for _, start in rest]
    for launch in flatten.launches(out, *arguments, kept=[] if wiped else kept):
        launch.run(out.device)
    reference.flatten_into(own, *arguments, kept)
    same(own, expected, exact=True)
    same(out, expected, exact=rounds or dtype != torch.bfloat16)
    check_guards(whole)


def compare_accumulate(
    lengths: Sequence[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float | None,
    alone: bool,
    specials: int,
    device: str,
    *,
    seed: int = 0,
    rounds: bool = True,
) -> None:
    """``alone``: the parts are measured, and there are no sums for them to join."""
    generator = torch.Generator().manual_seed(seed)
    parts = [Gradient((n,), "contiguous", dtypes[1], specials).make(generator, device) for n in lengths]
    starts = [Gradient((n,), "contiguous", dtypes[0], 0).make(generator, device) for n in lengths]
    mine = [poisoned(n, dtypes[0], device) for n in lengths]
    expected = [start.clone() for start in starts]
    for start, (total, _) in zip(starts, mine, strict=True):
        total.copy_(start)
    factor = None if scale is None else torch.tensor(scale, device=device)
    counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
    totals = [total for total, _ in mine]
    found = []
    for module, sums, count in ((accumulate, totals, counts[0]), (reference, expected, counts[1])):
        if alone:
            found.append(module.measure(parts, factor, count))
        else:
            found.append(module.accumulate(sums, parts, factor, count))
    squares, expected_squares = found
    again = [total.clone() for total in totals]
    for total, other, (_, whole) in zip(again, expected, mine, strict=True):
        same(total, other, exact=False)
        check_guards(whole)
    same(squares, expected_squares, exact=False, rtol=2e-5 if rounds else 1e-2)
    assert counts[0] == counts[1]


def compare_update(
    numbers: dict[str, Any],
    lengths: Sequence[int],
    dtype: torch.dtype,
    copy: torch.dtype | None,
    factor: float | None,
    device: str,
    *,
    step: int = 3,
    largest: bool = False,
    scheduled: float | None = None,
    skipped: float | None = None,
    odd: int = 0,
    seed: int = 0,
    rounds: bool = True,
) -> list[torch.Tensor]:
    """Runs one update by the kernel and by its reference; returns the kernel's parameters. Each ``odd``-th parameter
    begins at an address that is not aligned."""
    generator = torch.Generator().manual_seed(seed)

    def one(positive: bool = False) -> list[torch.Tensor]:
        values = [torch.randn(n, generator=generator) for n in lengths]
        return [(value.abs() if positive else value).to(dtype).to(device) for value in values]

    def scalar(value: float | None, wide: bool = True) -> torch.Tensor | None:
        return None if value is None else torch.tensor(value, dtype=torch.float64 if wide else torch.float32).to(device)

    lists = [one(), one(), one(), one(True), one(True) if largest else []]
    scalars = [scalar(1e-2), scalar(step, False), scalar(factor, False), scalar(scheduled), scalar(skipped)]
    copies = [poisoned(n, copy, device) for n in lengths] if copy is not None else []
    results = []
    for module in (update, reference):
        own = [[tensor.clone() for tensor in tensors] for tensors in lists]
        for place in range(0, len(lengths), odd or len(lengths) + 1)[1:]:
            own[0][place] = torch.cat([own[0][place][:1], own[0][place]])[1:]
        own.append([inner if module is update else inner.clone() for inner, _ in copies])
        module.adam(*own, *scalars, **numbers)
        results.append(own)
    for index, (mine, expected) in enumerate(zip(*results, strict=True)):
        for tensor, other in zip(mine, expected, strict=True):
            # the interpreter cuts bfloat16 off instead of rounding it
            same(tensor, other, exact=index == 1, rtol=2e-6 if rounds or dtype != torch.bfloat16 else 2**-6)
    for _, whole in copies:
        check_guards(whole)
    return results[0][0]


# What the trial of a kernel before its first use is asked to try.

F32, BF16, F64, I64 = torch.float32, torch.bfloat16, torch.float64, torch.int64


def like(name: str, lists: dict[str, Any], scalars: dict[str, torch.dtype], numbers: dict[str, Any]) -> Like:
    return Like(name, tuple(lists.items()), tuple(scalars.items()), tuple(numbers.items()))


LIKES = {
    "flatten": like("flatten", {"gradients": (F32, BF16)}, {"scale": F32}, {"dtype": F32}),
    "flatten_": like("flatten_", {"gradients": (F32,)}, {"flat": F32}, {}),
    "accumulate_": like("accumulate_", {"totals": (F32,), "parts": (BF16,)}, {"scale": F64, "nonfinite": I64}, {}),
    "measure": like("measure", {"parts": (F32, BF16)}, {}, {}),
    "adam_": like(
        "adam_",
        dict.fromkeys(("parameters", "gradients", "exp_avgs", "exp_avg_sqs"), (F32,)) | {"copies": (BF16,)},
        {"lr": F64, "step": F32, "factor": F64, "skipped": torch.bool},
        ADAM,
    ),
    "pack": like("pack", {}, {"values": F32, "seed": I64}, {"form": "int8"}),
    "unpack": like("unpack", {}, {"packed": torch.uint8}, {"dtype": F32, "form": "fp8"}),
    "combine": like("combine", {}, {"packed": torch.uint8}, {"dtype": F32, "form": "int8", "mean": True}),
}
