"""The launches that operators make, compiled for GPUs that need not be there, and what is read of the machine code.

`golden/registers.json` holds the registers a thread needs, by Triton, kernel and architecture. A Triton adds its own by
``python -m tests.compiled_kernels --record``; without the option they are printed, with what is wrong with a kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fsdp_compiled.kernels import accumulate, flatten, quantize, update
from fsdp_compiled.kernels.launch import Launch
from fsdp_compiled.kernels.reference import SQUARES, row_of

RECORD = Path(__file__).parent / "golden" / "registers.json"
ARCHITECTURES = (80, 90, 100)
REGISTERS = 128  # with this many, 16 warps fit on a multiprocessor: enough loads in flight
THREADS = 32
ADAMW: dict[str, Any] = {
    "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "maximize": False,
}  # fmt: skip


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def flattened(dtype: torch.dtype, reduced: torch.dtype, transposed: bool = False) -> Launch:
    """The gradients of a transformer's block, with one of odd size."""
    shapes = [(1024,), (1024,), (3072, 1024), (3072,), (1024, 1024), (1037,), (4096, 1024), (1024, 4096)]
    gradients = [tensor(*shape, dtype=dtype) for shape in shapes]
    if transposed:
        gradients = [tensor(*reversed(shape), dtype=dtype).t() if shape[1:] else tensor(0) for shape in shapes]
    offsets, end = [], 0
    for gradient in gradients:
        offsets.append(end)
        end += -(-gradient.numel() // 64) * 64
    (launch,) = flatten.launches(tensor(end, dtype=reduced), gradients, offsets, tensor())
    return launch


def shards(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [tensor(7_077_888, dtype=dtype), tensor(9_437_184, dtype=dtype), tensor(1037, dtype=dtype)]


def accumulated(dtype: torch.dtype) -> Launch:
    (launch,) = accumulate.launches(shards(), shards(dtype), tensor(10_000), tensor(), None)
    return launch


def measured(dtype: torch.dtype) -> Launch:
    count = torch.empty((), dtype=torch.int64, device="meta")
    (launch,) = accumulate.launches((), shards(dtype), tensor(10_000), tensor(dtype=torch.float64), count)
    return launch


def adam(copies: bool, count: int = 3, skipped: bool = False) -> Launch:
    """The first launch for so many shards."""
    launches = adams(copies, count, skipped)
    assert len(launches) == -(-count // update.TENSORS)
    return launches[0]


def adams(copies: bool, count: int, skipped: bool = False) -> list[Launch]:
    def many(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [tensor(7_077_888 + 1024 * index, dtype=dtype) for index in range(count - 1)] + [
            tensor(1037, dtype=dtype)
        ]

    return update.adam_launches(
        *[many() for _ in range(4)],
        [],
        many(torch.bfloat16) if copies else [],
        tensor(dtype=torch.float64),
        tensor(),
        tensor(),
        None,
        tensor() if skipped else None,
        **ADAMW,
    )


def packed(dtype: torch.dtype, form: str, numel: int = 9_437_184, ranks: int = 8) -> Launch:
    """What a rank sends of a unit's gradients, rounded at random."""
    rows = tensor(ranks * row_of(numel, ranks)[1], dtype=torch.uint8)
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    return quantize.pack_launch(tensor(numel, dtype=dtype), rows, ranks, seed, 3, form)


def unpacked(dtype: torch.dtype, form: str, adds: bool = False, numel: int = 9_437_184, ranks: int = 8) -> Launch:
    """What it makes of gathered parameters, or of the parts of its gradients."""
    rows = tensor(ranks * row_of(numel, ranks)[1], dtype=torch.uint8)
    values = tensor(numel // ranks if adds else numel, dtype=dtype)
    return quantize.unpack_launch(rows, values, ranks, form, adds, mean=adds)


BF16, FP32 = torch.bfloat16, torch.float32
# Beside each, the bytes that a program with all of its block inside loads and stores.
CASES: dict[str, tuple[Any, int, int]] = {
    "flatten bfloat16 to float32": (lambda: flattened(BF16, FP32), 2 * flatten.BLOCK, 4 * flatten.BLOCK),
    "flatten float32": (lambda: flattened(FP32, FP32), 4 * flatten.BLOCK, 4 * flatten.BLOCK),
    "flatten transposed bfloat16 to float32": (lambda: flattened(BF16, FP32, True), 2 * 64 * 64, 4 * 64 * 64),
    "accumulate bfloat16": (lambda: accumulated(BF16), 6 * SQUARES, 4 * SQUARES),
    "measure float32": (lambda: measured(FP32), 4 * SQUARES, 0),
    "adamw": (lambda: adam(False), 16 * update.BLOCK, 12 * update.BLOCK),
    "adamw with bfloat16 copy": (lambda: adam(True), 16 * update.BLOCK, 14 * update.BLOCK),
    "adamw, 32 shards": (lambda: adam(False, 32), 16 * update.BLOCK, 12 * update.BLOCK),
    "adamw with bfloat16 copy, 32 shards": (lambda: adam(True, 32, True), 16 * update.BLOCK, 14 * update.BLOCK),
    "pack float32, int8": (lambda: packed(FP32, "int8"), 4 * quantize.BLOCK, quantize.BLOCK),
    "pack float32, fp8": (lambda: packed(FP32, "fp8"), 4 * quantize.BLOCK, quantize.BLOCK),
    "unpack to bfloat16, int8": (lambda: unpacked(BF16, "int8"), quantize.BLOCK, 2 * quantize.BLOCK),
    "unpack to bfloat16, fp8": (lambda: unpacked(BF16, "fp8"), quantize.BLOCK, 2 * quantize.BLOCK),
    "combine, int8": (lambda: unpacked(FP32, "int8", True), 2 * quantize.BLOCK, 4 * quantize.BLOCK),
    "combine, fp8": (lambda: unpacked(FP32, "fp8", True), 2 * quantize.BLOCK, 4 * quantize.BLOCK),
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


def other_forms() -> dict[str, Launch]:
    """What the launches above leave out: strides, dtypes, more than 2^31 elements, lists and scalars there or not."""
    scalar, wide = tensor(), tensor(dtype=torch.float64)
    gradients = [
        tensor(3, 70, 80).permute(0, 2, 1),  # tiles of several matrices
        tensor(4, 30, 50, dtype=torch.float16)[:, ::2, ::2],
        tensor(1).expand(1000),
        tensor(5 * 2**29, 2)[:, 0],
    ]
    offsets = [64, 20_000, 30_000, 40_000]
    mine, half = shards(), shards(BF16)
    coupled = ADAMW | {"decoupled": False, "maximize": True}
    double = shards(torch.float64)
    found = {"strided": flatten.launches(tensor(2**32, dtype=torch.float16), gradients, offsets)}
    count = tensor(dtype=torch.int64)
    found["accumulate"] = accumulate.launches(double, mine, tensor(10_000, dtype=torch.float64), scalar, count)
    found["adam"] = update.adam_launches(mine, half, mine, mine, mine, half, wide, scalar, None, wide, wide, **coupled)
    found["adam in float64"] = update.adam_launches(*[double] * 4, [], [], wide, scalar, **ADAMW)
    odd = {"numel": 5 * 2**29 + 1, "ranks": 3}  # rows that end in the midst of a block
    found["pack"], found["unpack"] = [packed(torch.float16, "int8", **odd)], [unpacked(torch.float16, "fp8", **odd)]
    return {name: launches[0] for name, launches in found.items()}


def registers(architectures: Sequence[int]) -> dict[str, dict[str, int]]:
    return {
        name: {f"sm_{cc}": compiled(launch(), cc).registers for cc in architectures}
        for name, (launch, _, _) in CASES.items()
    }


def main() -> None:
    if "--record" in sys.argv:
        record = json.loads(RECORD.read_text()) | {triton.__version__: registers(ARCHITECTURES)}
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")
        return
    wrong = {name: said for name, (launch, _, _) in CASES.items() if (said := problems(name, compiled(launch(), 90)))}
    wrong |= {name: ["spills"] for name, launch in other_forms().items() if compiled(launch, 90).spilled}
    print(json.dumps({"triton": triton.__version__, "registers": registers([90]), "wrong": wrong}))


if __name__ == "__main__":
    main()
