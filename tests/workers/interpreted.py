"""The kernels in Triton's interpreter against their references.

Triton decides when it is imported whether it interprets, so this runs in a process of its own, with
TRITON_INTERPRET=1: tests/kernels/test_kernels_interpreted.py starts it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fsdp_compiled.kernels import quantize, reference
from fsdp_compiled.kernels.flatten import strided_offsets, tile_corner
from fsdp_compiled.kernels.launch import group_constants, located
from fsdp_compiled.kernels.layout import MOST, TILE, Group, ceil_div, contiguous
from fsdp_compiled.kernels.operators import RUNS
from fsdp_compiled.kernels.reference import ROW, SCALED
from fsdp_compiled.kernels.trial import failure
from tests.chosen import TORCH
from tests.kernel_cases import (
    ADAM,
    LAYOUTS,
    LIKES,
    SPECIAL,
    Gradient,
    accumulates,
    compare_accumulate,
    compare_flatten,
    compare_flatten_into,
    compare_update,
    flattens,
    flattens_into,
    gradients,
    same,
    sizes,
)

# numpy warns where a number overflows; the interpreter's bfloat16 is cut off, not rounded
pytestmark = pytest.mark.filterwarnings("ignore")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**flattens, seed=st.integers(0, 99))
def test_flatten(**case: Any) -> None:
    compare_flatten(**case, device="cpu", rounds=False)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(**flattens_into, seed=st.integers(0, 99))
def test_flatten_the_rest(**case: Any) -> None:
    compare_flatten_into(**case, device="cpu", rounds=False)


def test_what_is_there_would_be_wiped_if_it_were_not_said() -> None:
    unit = [Gradient((64,), "contiguous", torch.float32, 0), Gradient((8, 8), "contiguous", torch.float32, 0)]
    for wiped in (False, True):
        with pytest.raises(AssertionError) if wiped else nullcontext():
            compare_flatten_into(unit, [0, 5, 70], torch.float32, [False, True], "cpu", wiped=wiped)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1,), (64, 64), (130, 67), (2, 3, 66, 65), (16, 4097)])
def test_flatten_of_one(shape: tuple[int, ...], layout: str) -> None:
    compare_flatten([Gradient(shape, layout, torch.float32, 2)], [3, 70], torch.float32, 0.5, "cpu")


def test_flatten_of_more_than_a_launch_holds() -> None:
    kinds = ("contiguous", "permuted", "misaligned", "contiguous", "sliced")
    unit = [Gradient((3 + index % 7, 20), kinds[index % 5], torch.float32, index % 2) for index in range(2 * MOST + 9)]
    compare_flatten(unit, [index % 3 for index in range(len(unit))] + [70], torch.float32, 0.5, "cpu")


def test_lists_of_more_than_a_launch_holds() -> None:
    lengths = [1 + 37 * index % 5000 for index in range(MOST + 3)]
    compare_accumulate(lengths, (torch.float32, torch.bfloat16), 0.5, False, 1, "cpu")
    compare_update(ADAM, lengths, torch.float32, None, 0.5, "cpu", rounds=False)


def test_an_update_with_copies_over_32_shards() -> None:
    """The default form at scale: several launches, some rows at addresses that are not aligned."""
    lengths = [1 + 211 * index % 3000 for index in range(32)]
    for skipped in (None, 0.0, 2.0):
        compare_update(ADAM, lengths, torch.float32, torch.float16, 0.5, "cpu", skipped=skipped, odd=5)


def test_a_gradient_read_in_the_wrong_order_is_noticed() -> None:
    unit = [Gradient((64, 64), "permuted", torch.float32, 0)]
    with pytest.raises(AssertionError):
        compare_flatten(unit, [0, 0], torch.float32, None, "cpu", damage=lambda tensors: [tensors[0].t()])


def test_a_missed_infinity_is_noticed() -> None:
    unit = [Gradient((64,), "contiguous", torch.float32, 1)]
    with pytest.raises(AssertionError):
        compare_flatten(unit, [0, 0], torch.float32, None, "cpu", damage=lambda tensors: [tensors[0].nan_to_num()])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(**accumulates)
def test_accumulate(**case: Any) -> None:
    compare_accumulate(**case, device="cpu")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    lengths=sizes,
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    copy=st.sampled_from((None, torch.float16, torch.bfloat16)),
    factor=st.sampled_from((None, 0.5)),
    step=st.sampled_from((1, 2, 500, 10**6)),
    largest=st.booleans(),
    scheduled=st.sampled_from((None, 0.85)),
    skipped=st.sampled_from((None, 0.0, 2.0)),
    decoupled=st.booleans(),
    maximize=st.booleans(),
)
def test_adam(lengths: list[int], decoupled: bool, maximize: bool, **case: Any) -> None:
    assume((case["dtype"], case["copy"]) != (torch.float64, torch.bfloat16))  # the interpreter cannot convert that
    numbers = ADAM | {"decoupled": decoupled, "maximize": maximize}
    compare_update(numbers, lengths, device="cpu", rounds=False, **case)


@pytest.mark.parametrize("change", [{"weight_decay": 0.101}, {"beta1": 0.901}, {"beta2": 0.9985}, {"eps": 1e-3}])
def test_an_update_with_another_number_is_another(change: dict[str, float]) -> None:
    """The control of the one above: it shows at a tolerance no finer than its."""
    mine = compare_update(ADAM, [100], torch.float32, None, None, "cpu")
    other = compare_update(ADAM | change, [100], torch.float32, None, None, "cpu")
    assert not torch.allclose(mine[0], other[0], rtol=2e-6, atol=1e-7)


def test_a_skipped_update_writes_nothing() -> None:
    start = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for skipped, kept in ((1.0, True), (0.0, False), (None, False)):
        (mine,) = compare_update(ADAM, [100], torch.float32, None, None, "cpu", skipped=skipped)
        assert torch.equal(mine, start) == kept


# More than 2^31 elements: where they lie is arithmetic, which runs here on numbers that no memory backs.

FAR = 5 * 2**31 + 12_345


@triton.jit
def _locate(out, program, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    begin, offset, size, room = located(GROUPS, 0, tl.load(program), BLOCK)
    tl.store(out, begin)
    tl.store(out + 1, offset)
    tl.store(out + 2, size)
    tl.store(out + 3, room)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(piece=st.integers(0, 2), fraction=st.floats(0, 1))
def test_a_program_far_behind_finds_its_place(piece: int, fraction: float) -> None:
    lengths = [FAR, 77, 3 * FAR]
    offsets = [5, FAR + 64, FAR + 200]
    stops = [FAR + 64, FAR + 200, 4 * FAR + 1000]
    starts = [0]
    for offset, stop in zip(offsets, stops, strict=True):
        starts.append(starts[-1] + ceil_div(stop - offset, 4096))
    groups = (Group(tuple(starts), tuple(offsets), tuple(lengths), tuple(stops)),)
    last = starts[piece + 1] - starts[piece] - 1
    block = int(fraction * last)
    out = torch.full((4,), -1)
    _locate[(1,)](
        out,
        torch.tensor(starts[piece] + block, dtype=torch.int32),
        GROUPS=tuple(map(group_constants, groups)),
        BLOCK=4096,
    )
    assert out.tolist() == [block * 4096, offsets[piece], lengths[piece], stops[piece] - offsets[piece]]


@triton.jit
def _offset(out, index, SHAPE: tl.constexpr, STRIDE: tl.constexpr, NARROW: tl.constexpr):
    place = tl.load(index)
    if NARROW:
        tl.store(out, strided_offsets(place.to(tl.int32), SHAPE, STRIDE))
    else:
        tl.store(out, strided_offsets(place, SHAPE, STRIDE))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(fraction=st.floats(0, 1))
def test_an_element_far_behind_finds_its_address(fraction: float) -> None:
    shape, stride = (3, 100_003, 70_001), (1, 6, 700_000)
    group = Group((0, 1), (0,), (math.prod(shape),), (math.prod(shape),), shape, stride)
    assert group.wide
    index = int(fraction * (math.prod(shape) - 1))
    where = (index // (shape[1] * shape[2]), index // shape[2] % shape[1], index % shape[2])
    expected = sum(at * step for at, step in zip(where, stride, strict=True))
    found = []
    for narrow in (False, True):
        out = torch.full((), -1)
        _offset[(1,)](out, torch.tensor(index), SHAPE=shape, STRIDE=stride, NARROW=narrow)
        found.append(out.item())
    assert found[0] == expected
    if index >= 2**32:  # control: 32 bits are not enough
        assert found[1] != expected


@triton.jit
def _corner(out, tile, SHAPE: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, OUTER: tl.constexpr):
    row, column, begin = tile_corner(tl.load(tile), SHAPE, STRIDE, DIM, OUTER, 64)
    tl.store(out, row)
    tl.store(out + 1, column)
    tl.store(out + 2, begin)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(fraction=st.floats(0, 1))
def test_a_tile_far_behind_finds_its_corner(fraction: float) -> None:
    shape, tile = (5, 50_001, 40_003), 1
    stride, outer = contiguous(shape), (0,)
    down, across = ceil_div(shape[1], TILE), ceil_div(shape[2], TILE)
    number = int(fraction * (shape[0] * down * across - 1))
    out = torch.full((3,), -1)
    _corner[(1,)](out, torch.tensor(number), SHAPE=shape, STRIDE=stride, DIM=tile, OUTER=outer)
    matrix, rest = divmod(number, down * across)
    assert out.tolist() == [rest // across * TILE, rest % across * TILE, matrix * shape[1] * shape[2]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(gradient=gradients)
def test_cases_are_what_they_say(gradient: Gradient) -> None:
    """The layouts that the tests above name do occur."""
    tensor = gradient.make(torch.Generator().manual_seed(0), "cpu")
    assert tensor.shape == gradient.shape
    if gradient.layout == "misaligned" and tensor.numel():
        assert tensor.data_ptr() % 16
    if gradient.layout == "expanded" and gradient.shape:
        assert tensor.stride(0) == 0 or tensor.shape[0] == 1
    if gradient.layout in ("permuted", "sliced") and min((0, 0, *gradient.shape)[-2:]) > 1:
        assert not tensor.is_contiguous()


# The interpreter of Triton 3.6 cannot take a number out of "combine".
@pytest.mark.parametrize("name", [name for name in LIKES if name != "combine" or TORCH >= (2, 12)])
def test_the_trial_on_first_use_believes_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32: the interpreter cuts bfloat16 off."""
    like = LIKES[name]
    lists = tuple((key, tuple(torch.float32 for _ in dtypes)) for key, dtypes in like.lists)
    numbers = tuple((key, torch.float32 if key == "dtype" else value) for key, value in like.numbers)
    monkeypatch.setitem(RUNS, (name, "cpu"), RUNS[name, "cuda"])
    assert failure(replace(like, lists=lists, numbers=numbers), torch.device("cpu")) == ""


def odd_values(numel: int, specials: int) -> torch.Tensor:
    """Of many sizes, with blocks of nothing but zeros among them, and a few that are NaN or infinite."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-20, 20, (numel,), generator=generator)
    values[SCALED : 2 * SCALED] = 0.0
    values[4 * SCALED : 4 * SCALED + 5] = -0.0
    for index in range(min(specials, numel)):
        values[index * 701 % numel] = SPECIAL[index % 3]
    return values


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    numel=st.one_of(st.sampled_from((1, SCALED - 1, SCALED, ROW + 1, 2 * quantize.BLOCK + 1)), st.integers(1, 6000)),
    rows=st.integers(1, 4),
    form=st.sampled_from(("int8", "fp8")),
    seed=st.sampled_from((None, 0, 7, 2**40 + 3)),
    specials=st.sampled_from((0, 0, 1, 5)),
    mean=st.booleans(),
)
def test_quantised(numel: int, rows: int, form: str, seed: int | None, specials: int, mean: bool) -> None:
    """Packed, read and added up: each as the reference does it, bit for bit but for NaN's own bits."""
    values = odd_values(numel, specials)
    noise = () if seed is None else (torch.tensor(seed), 11)
    mine = RUNS["pack", "cuda"](values, rows, *noise, form=form)
    packed = reference.pack(values, rows, *noise, form=form)
    assert torch.equal(mine, packed), (mine != packed).nonzero().flatten()[:10]
    read = RUNS["unpack", "cuda"](packed, rows, numel, torch.float32, form=form)
    same(read, reference.unpack(packed, rows, numel, torch.float32, form=form), exact=True)
    assert read.isfinite().all() or specials
    part = ceil_div(numel, rows)
    if TORCH >= (2, 12):  # the interpreter of Triton 3.6 cannot take a number out of "combine"
        given = (packed, rows, part, torch.float32)
        same(
            RUNS["combine", "cuda"](*given, form=form, mean=mean),
            reference.combine(*given, form=form, mean=mean),
            exact=True,
        )


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_quantised_numbers_of_another_seed_or_form_are_others(form: str) -> None:
    """The control of the one above."""
    values = odd_values(1000, 0)
    mine = RUNS["pack", "cuda"](values, 2, torch.tensor(3), 11, form=form)
    for seed, salt, other in ((4, 11, form), (3, 12, form), (3, 11, {"int8": "fp8", "fp8": "int8"}[form])):
        assert not torch.equal(mine, reference.pack(values, 2, torch.tensor(seed), salt, form=other))
