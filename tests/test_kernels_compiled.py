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
from triton.compiler import ASTSource  # noqa: E402

from fsdp_compiled.kernels import accumulate, flatten, update  # noqa: E402
from fsdp_compiled.kernels.launch import Launch  # noqa: E402
from fsdp_compiled.kernels.options import SGD, Adam  # noqa: E402
from fsdp_compiled.kernels.reference import SQUARES  # noqa: E402

RECORD = Path(__file__).parent / "golden" / "registers.json"
ARCHITECTURES = (80, 90, 100)
REGISTERS = 128  # with this many, 16 warps fit on a multiprocessor: enough loads in flight
THREADS = 32
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
}
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
    return flatten.launch(_tensor(end, dtype=reduced), gradients, offsets, _tensor(), count)


def _shards(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [_tensor(7_077_888, dtype=dtype), _tensor(9_437_184, dtype=dtype), _tensor(1037, dtype=dtype)]


def _accumulate(dtype: torch.dtype) -> Launch:
    (launch,) = accumulate.launches(_shards(), _shards(dtype), _tensor(10_000), _tensor(), None, fresh=False)
    return launch


def _adam(copies: bool) -> Launch:
    lists = [_shards() for _ in range(4)]
    (launch,) = update.adam_launches(
        *lists,
        [],
        _shards(torch.bfloat16) if copies else [],
        _tensor(dtype=torch.float64),
        _tensor(),
        _tensor(),
        options=ADAMW,
    )
    return launch


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
    "adamw": (lambda: _adam(False), 16 * update.BLOCK, 12 * update.BLOCK),
    "adamw with bfloat16 copy": (lambda: _adam(True), 16 * update.BLOCK, 14 * update.BLOCK),
    "sgd": (_sgd, 12 * update.BLOCK, 8 * update.BLOCK),
}


@dataclass(frozen=True)
class Compiled:
    registers: int
    spilled: bool
    wide_loads: int  # 128-bit instructions
    wide_stores: int


def compiled(launch: Launch, architecture: int, aligned: bool = True, **options: Any) -> Compiled:
    """What the compiler makes of this launch. ``aligned``: whether it is told that addresses are multiples of 16."""
    names, constants, hints = launch.kernel.arg_names, {}, {}

    def describe(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            if aligned and value.data_ptr() % 16 == 0:
                hints[path] = [["tt.divisibility", 16]]
            return "*" + TYPES[value.dtype]
        if isinstance(value, tuple) and not names[path[0]].isupper():
            return tuple(describe(member, (*path, index)) for index, member in enumerate(value))
        constants[path] = value
        return "constexpr"

    signature = {name: describe(launch.arguments[name], (index,)) for index, name in enumerate(names)}
    source = ASTSource(launch.kernel, signature, constants, hints)
    target = GPUTarget("cuda", architecture, 32)
    return _read(triton.compile(source, target=target, options={"num_warps": launch.warps, **options}).asm["cubin"])


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_to_wide_accesses_without_spills(name: str, architecture: int) -> None:
    found = compiled(CASES[name][0](), architecture)
    assert not problems(name, found)
    record = json.loads(RECORD.read_text())
    if record["triton"] == triton.__version__:
        assert found.registers == record["registers"][name][f"sm_{architecture}"]


def test_narrow_accesses_are_noticed() -> None:
    found = compiled(CASES["adamw"][0](), 90, aligned=False)
    assert any("loads of 128 bits" in problem for problem in problems("adamw", found))
    assert any("stores of 128 bits" in problem for problem in problems("adamw", found))


def test_spills_are_noticed() -> None:
    name = "flatten float32"
    assert problems(name, compiled(CASES[name][0](), 90, maxnreg=24)) == ["registers are spilled"]


def test_one_odd_address_does_not_narrow_the_others() -> None:
    gradients = [torch.empty(40_001)[1:], *(torch.empty(40_000) for _ in range(2))]
    launch = flatten.launch(torch.empty(120_064), gradients, [0, 40_000, 80_000])
    assert [group.count for group in launch.arguments["GROUPS"]] == [1, 2]
    assert compiled(launch, 90).wide_loads >= 4 * flatten.BLOCK // (16 * THREADS * launch.warps)


def main() -> None:
    registers = {
        name: {f"sm_{cc}": compiled(launch(), cc).registers for cc in ARCHITECTURES}
        for name, (launch, _, _) in CASES.items()
    }
    RECORD.write_text(json.dumps({"triton": triton.__version__, "registers": registers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
