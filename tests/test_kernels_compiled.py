"""Every kernel compiled for GPUs that need not be there: no spills, 128-bit loads and stores, registers on record.

`golden/registers.json` holds the registers a thread needs, by kernel and architecture, with the Triton that was used.
To write it anew: ``python -m tests.test_kernels_compiled``.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from fsdp_compiled.kernels import accumulate, flatten, update  # noqa: E402
from fsdp_compiled.kernels.launch import Launch  # noqa: E402
from fsdp_compiled.kernels.layout import MOST  # noqa: E402
from fsdp_compiled.kernels.options import SGD, Adam  # noqa: E402
from fsdp_compiled.kernels.reference import SQUARES  # noqa: E402
from tests.chosen import chosen  # noqa: E402

RECORD = Path(__file__).parent / "golden" / "registers.json"
ARCHITECTURES = (80, 90, 100)
REGISTERS = 128  # with this many, 16 warps fit on a multiprocessor: enough loads in flight
THREADS = 32
ADAMW = Adam(0.9, 0.999, 1e-8, 0.1, decoupled=True, maximize=False)


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _flatten(dtype: torch.dtype, reduced: torch.dtype, transposed: bool = False) -> Launch:
    """The gradients of a transformer's block, with one of odd size."""
    shapes = [(1024,), (1024,), (3072, 1024), (3072,), (1024, 1024), (1037,), (4096, 1024), (1024, 4096)]
    gradients = [_tensor(*shape, dtype=dtype) for shape in shapes]
    if transposed:
        gradients = [_tensor(*reversed(shape), dtype=dtype).t() if shape[1:] else _tensor(0) for shape in shapes]
    offsets, end = [], 0
    for gradient in gradients:
        offsets.append(end)
        end += -(-gradient.numel() // 64) * 64
    count = torch.empty((), dtype=torch.int64, device="meta")
    (launch,) = flatten.launches(_tensor(end, dtype=reduced), gradients, offsets, _tensor(), count)
    return launch


def _shards(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [_tensor(7_077_888, dtype=dtype), _tensor(9_437_184, dtype=dtype), _tensor(1037, dtype=dtype)]


def _accumulate(dtype: torch.dtype) -> Launch:
    (launch,) = accumulate.launches(_shards(), _shards(dtype), _tensor(10_000), _tensor(), None)
    return launch


def _measure(dtype: torch.dtype) -> Launch:
    count = torch.empty((), dtype=torch.int64, device="meta")
    (launch,) = accumulate.launches((), _shards(dtype), _tensor(10_000), _tensor(dtype=torch.float64), count)
    return launch


def _adam(copies: bool, count: int = 3, skipped: bool = False) -> Launch:
    """The first launch for so many shards."""
    launches = _adams(copies, count, skipped)
    assert len(launches) == -(-count // update.TENSORS)
    return launches[0]


def _adams(copies: bool, count: int, skipped: bool = False) -> list[Launch]:
    def shards(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [_tensor(7_077_888 + 1024 * index, dtype=dtype) for index in range(count - 1)] + [
            _tensor(1037, dtype=dtype)
        ]

    return update.adam_launches(
        *[shards() for _ in range(4)],
        [],
        shards(torch.bfloat16) if copies else [],
        _tensor(dtype=torch.float64),
        _tensor(),
        _tensor(),
        None,
        _tensor() if skipped else None,
        options=ADAMW,
    )


def _sgd() -> Launch:
    lists = [_shards() for _ in range(3)]
    options = SGD(momentum=0.9, dampening=0.0, weight_decay=0.1, nesterov=True, maximize=False)
    (launch,) = update.sgd_launches(*lists, [], _tensor(dtype=torch.float64), None, _tensor(), options=options)
    return launch


BF16, FP32 = torch.bfloat16, torch.float32
# Beside each, the bytes that a program with all of its block inside loads and stores.
CASES: dict[str, tuple[Any, int, int]] = {
    "flatten bfloat16 to float32": (lambda: _flatten(BF16, FP32), 2 * flatten.BLOCK, 4 * flatten.BLOCK),
    "flatten float32": (lambda: _flatten(FP32, FP32), 4 * flatten.BLOCK, 4 * flatten.BLOCK),
    "flatten transposed bfloat16 to float32": (lambda: _flatten(BF16, FP32, True), 2 * 64 * 64, 4 * 64 * 64),
    "accumulate bfloat16": (lambda: _accumulate(BF16), 6 * SQUARES, 4 * SQUARES),
    "measure float32": (lambda: _measure(FP32), 4 * SQUARES, 0),
    "adamw": (lambda: _adam(False), 16 * update.BLOCK, 12 * update.BLOCK),
    "adamw with bfloat16 copy": (lambda: _adam(True), 16 * update.BLOCK, 14 * update.BLOCK),
    "adamw, 32 shards": (lambda: _adam(False, 32), 16 * update.BLOCK, 12 * update.BLOCK),
    "adamw with bfloat16 copy, 32 shards": (lambda: _adam(True, 32, True), 16 * update.BLOCK, 14 * update.BLOCK),
    "sgd": (_sgd, 12 * update.BLOCK, 8 * update.BLOCK),
}


@dataclass(frozen=True)
class Compiled:
    registers: int
    spilled: bool
    wide_loads: int  # 128-bit instructions
    wide_stores: int
    shared: int  # bytes of shared memory
    loads: tuple[str, ...]  # the instructions, in order
    reciprocals: int  # instructions that a division begins with
    bodies: int  # how often the block's code is there: for a whole one, and for the end of a tensor

    def blocks(self, warps: int) -> int:
        """How many a multiprocessor of sm_80 to sm_100 works on: it has 65,536 registers, given out by the warp in
        portions of 256, and room for 64 warps."""
        each = -(-self.registers * THREADS // 256) * 256
        return min(65_536 // (each * warps), 64 // warps)


class _StandIn:
    """A driver without a GPU: it tells Triton which one to compile for, a device of its own for each."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.architecture, 32)


def compiled(launch: Launch, architecture: int, **options: Any) -> Compiled:
    """What Triton makes of this launch, on the way that it takes on a GPU."""
    before = driver._active
    driver.set_active(_StandIn(architecture))
    try:
        kernel = launch.kernel.warmup(grid=(launch.programs,), num_warps=launch.warps, **launch.given, **options)
        return _read(kernel.asm["cubin"])
    finally:
        driver._active = before  # none at first: asking for one would look for a GPU


def _read(cubin: bytes) -> Compiled:
    usage = _tool("cuobjdump", cubin, "-res-usage")
    code = _tool("nvdisasm", cubin, "-c")
    (registers,) = re.findall(r"REG:(\d+)", usage)
    (local,) = re.findall(r"LOCAL:(\d+)", usage)
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return Compiled(
        registers=int(registers),
        spilled=bool(int(local) or int(stack) or re.search(r"\b(LDL|STL)\b", code)),
        wide_loads=len(re.findall(r"\bLDG\S*\.128\b", code)),
        wide_stores=len(re.findall(r"\bSTG\S*\.128\b", code)),
        shared=int(re.findall(r"SHARED:(\d+)", usage)[0]),
        loads=tuple(re.findall(r"\bLDG\S*", code)),
        reciprocals=len(re.findall(r"\bMUFU\.RCP\b", code)),
        bodies=len(re.findall(r"\bMUFU\.EX2\b", code)) // 2,
    )


def _tool(name: str, cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    path = Path(triton.knobs.cache.dir) / f"read-{name}-{hash(cubin)}.cubin"
    path.write_bytes(cubin)
    try:
        return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
    finally:
        path.unlink()


def problems(name: str, found: Compiled) -> list[str]:
    launch, loaded, stored = CASES[name]
    a_load = 16 * THREADS * launch().warps  # bytes
    said = []
    if found.spilled:
        said.append("registers are spilled")
    if found.registers > REGISTERS:
        said.append(f"{found.registers} registers a thread")
    if found.wide_loads < loaded // a_load:
        said.append(f"{found.wide_loads} loads of 128 bits, expected {loaded // a_load}")
    if found.wide_stores < stored // a_load:
        said.append(f"{found.wide_stores} stores of 128 bits, expected {stored // a_load}")
    return said


@pytest.mark.parametrize("architecture", chosen(ARCHITECTURES, [90]))
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_to_wide_accesses_without_spills(name: str, architecture: int) -> None:
    found = compiled(CASES[name][0](), architecture)
    assert not problems(name, found)
    record = json.loads(RECORD.read_text())
    if record["triton"] == triton.__version__:
        assert found.registers == record["registers"][name][f"sm_{architecture}"]


@pytest.mark.parametrize("architecture", chosen(ARCHITECTURES, [90]))
@pytest.mark.parametrize("copies", [False, True])
def test_adamw_over_32_shards_keeps_the_memory_busy(copies: bool, architecture: int) -> None:
    """48 of a multiprocessor's 64 warps or more, each with four loads of 16 bytes a thread on their way; an element is
    divided once. Of one launch for all 32, in blocks of four warps: 109 registers, 16 warps."""
    launch = _adam(copies, 32, skipped=True)
    found = compiled(launch, architecture)
    assert found.blocks(launch.warps) * launch.warps >= 48
    assert found.shared == 0
    elements = update.BLOCK // (launch.warps * THREADS)
    assert found.reciprocals <= found.bodies * (elements + 1) + 1, "and one for the rate, and a subroutine's"
    scalars = 4  # rate, step, factor, skipped
    first = found.loads[: 4 + scalars]
    assert sum("128" in load for load in first) == 4, f"all are asked for before any is waited for: {first}"


def test_one_launch_for_32_shards_would_not() -> None:
    """The control: the form that this one took the place of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "TENSORS", MOST)
        patch.setattr(update, "WARPS", 4)
        (launch,) = _adams(True, 32)
    assert compiled(launch, 90).blocks(4) * 4 < 32


def test_a_row_with_an_odd_address_does_not_narrow_the_others() -> None:
    lists = [[torch.empty(4097)[1:], *(torch.empty(4096) for _ in range(2))], *([torch.empty(4096)] * 3,) * 3]
    whole, odd = update.adam_launches(*lists, [], [], _tensor(), _tensor(), options=ADAMW)[::-1]
    assert [len(launch.arguments["parameters"]) for launch in (whole, odd)] == [2, 1]
    assert not problems("adamw", compiled(whole, 90))
    whole, odd = accumulate.launches(lists[0], lists[1], _tensor(3), None, None)[::-1]
    assert compiled(whole, 90).wide_loads > compiled(odd, 90).wide_loads


def test_narrow_accesses_are_noticed() -> None:
    """Addresses that are no multiple of 16 bytes; the memory is never touched."""
    lists = [[torch.empty(9_437_185)[1:]] for _ in range(4)]
    (launch,) = update.adam_launches(*lists, [], [], _tensor(), _tensor(), options=ADAMW)
    said = problems("adamw", compiled(launch, 90))
    assert any("loads of 128 bits" in problem for problem in said)
    assert any("stores of 128 bits" in problem for problem in said)


def test_spills_are_noticed() -> None:
    name = "flatten float32"
    assert problems(name, compiled(CASES[name][0](), 90, maxnreg=24)) == ["registers are spilled"]


def test_what_a_call_works_on_is_planned_once() -> None:
    """Later calls on tensors of the same form find the plan; of another form, dtype or alignment, they do not."""
    launch, again, other = (_flatten(*dtypes) for dtypes in ((BF16, FP32), (BF16, FP32), (FP32, FP32)))
    assert launch.arguments["GROUPS"] is again.arguments["GROUPS"] is not other.arguments["GROUPS"]
    first, second = (_adam(True).arguments["GROUPS"][0] for _ in range(2))
    assert first is second
    places = [torch.empty(4097)[:-1], torch.empty(4097)[1:]]
    even, odd = (accumulate.launches((), [place], _tensor(1))[0].arguments["GROUPS"][0] for place in places)
    assert even is not odd
    two, three = (flatten.launches(torch.empty(64), [torch.empty(8)], [at])[0].arguments["GROUPS"] for at in (0, 16))
    assert two != three


def test_one_odd_address_does_not_narrow_the_others() -> None:
    gradients = [torch.empty(40_001)[1:], *(torch.empty(40_000) for _ in range(2))]
    (launch,) = flatten.launches(torch.empty(120_064), gradients, [0, 40_000, 80_000])
    assert [group.count for group in launch.arguments["GROUPS"]] == [1, 2]
    assert compiled(launch, 90).wide_loads >= 4 * flatten.BLOCK // (16 * THREADS * launch.warps)


@pytest.mark.parametrize("kind", chosen(["flatten", "flatten transposed", "adam"], ["flatten", "adam"]))
def test_many_tensors_are_launches_that_each_compile_well(kind: str) -> None:
    many = 3 * MOST + 5
    if kind == "adam":
        launches = update.adam_launches(
            *[[_tensor(16_384) for _ in range(many)] for _ in range(4)], [], [], _tensor(), _tensor(), options=ADAMW
        )
    else:
        sources = [_tensor(128, 128) for _ in range(many)]
        if kind == "flatten transposed":
            sources[:MOST] = [source.t() for source in sources[:MOST]]
        launches = flatten.launches(_tensor(16_384 * many), sources, [16_384 * index for index in range(many)])
        assert sum(len(group.sizes) for launch in launches for group in launch.arguments["GROUPS"]) == many
    assert len(launches) == (-(-many // update.TENSORS) if kind == "adam" else 4)
    for launch in launches[:1]:
        found = compiled(launch, 90)
        assert not found.spilled and found.registers <= REGISTERS and found.wide_loads


def _other_forms() -> dict[str, Launch]:
    """What the launches above leave out: strides, dtypes, more than 2^31 elements, lists and scalars there or not."""
    scalar, wide = _tensor(), _tensor(dtype=torch.float64)
    gradients = [
        _tensor(3, 70, 80).permute(0, 2, 1),  # tiles of several matrices
        _tensor(4, 30, 50, dtype=torch.float16)[:, ::2, ::2],
        _tensor(1).expand(1000),
        _tensor(5 * 2**29, 2)[:, 0],
    ]
    offsets = [64, 20_000, 30_000, 40_000]
    mine, half = _shards(), _shards(BF16)
    every = SGD(momentum=0.9, dampening=0.1, weight_decay=0.1, nesterov=False, maximize=True)
    plain = SGD(momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)
    coupled = Adam(0.9, 0.999, 1e-8, 0.1, decoupled=False, maximize=True)
    double = _shards(torch.float64)
    found = {"strided": flatten.launches(_tensor(2**32, dtype=torch.float16), gradients, offsets)}
    count = _tensor(dtype=torch.int64)
    found["accumulate"] = accumulate.launches(double, mine, _tensor(10_000, dtype=torch.float64), scalar, count)
    found["adam"] = update.adam_launches(
        mine, half, mine, mine, mine, half, wide, scalar, None, wide, wide, options=coupled
    )
    found["adam in float64"] = update.adam_launches(*[double] * 4, [], [], wide, scalar, options=ADAMW)
    found["sgd"] = update.sgd_launches(mine, mine, mine, half, wide, wide, None, wide, wide, options=every)
    found["plain sgd"] = update.sgd_launches(mine, mine, [], [], wide, options=plain)
    return {name: launches[0] for name, launches in found.items()}


@pytest.mark.parametrize("form", _other_forms())
def test_every_other_form_compiles_without_spills(form: str) -> None:
    found = compiled(_other_forms()[form], 90)
    assert not found.spilled and found.registers <= 255


def main() -> None:
    registers = {
        name: {f"sm_{cc}": compiled(launch(), cc).registers for cc in ARCHITECTURES}
        for name, (launch, _, _) in CASES.items()
    }
    RECORD.write_text(json.dumps({"triton": triton.__version__, "registers": registers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
