"""Every kernel compiled for GPUs that need not be there: no spills, 128-bit loads and stores, registers on record; with
the Triton that is here, and with those of other environments, where there are any.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.compiler.code_generator import CodeGenerator  # noqa: E402
from triton.compiler.compiler import ASTSource  # noqa: E402

from fsdp_compiled.kernels import accumulate, flatten, update  # noqa: E402
from fsdp_compiled.kernels.launch import Launch  # noqa: E402
from fsdp_compiled.kernels.layout import MOST  # noqa: E402
from tests.chosen import chosen  # noqa: E402
from tests.compiled_kernels import (  # noqa: E402
    ADAMW,
    ARCHITECTURES,
    BF16,
    CASES,
    FP32,
    RECORD,
    REGISTERS,
    THREADS,
    adam,
    adams,
    compiled,
    flattened,
    other_forms,
    problems,
    tensor,
)  # fmt: skip

ROOT = Path(__file__).parents[2]
OTHERS = os.environ["OTHERS"].split() if "OTHERS" in os.environ else sorted(map(str, ROOT.glob(".venv-*/bin/python")))


@pytest.mark.parametrize("architecture", chosen(ARCHITECTURES, [90]))
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_to_wide_accesses_without_spills(name: str, architecture: int) -> None:
    found = compiled(CASES[name][0](), architecture)
    assert not problems(name, found)
    record = json.loads(RECORD.read_text())
    assert triton.__version__ in record, "a new Triton: python -m tests.compiled_kernels --record"
    assert found.registers == record[triton.__version__][name][f"sm_{architecture}"]


@pytest.mark.exhaustive  # each torch's own tests compile them, above
@pytest.mark.parametrize("python", OTHERS or [pytest.param("", marks=pytest.mark.skip("no other environment"))])
def test_the_triton_of_another_torch_compiles_all_of_them(python: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [python, "-P", "-m", "tests.compiled_kernels"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["wrong"]
    record = json.loads(RECORD.read_text())[found["triton"]]
    assert found["registers"] == {name: {"sm_90": entry["sm_90"]} for name, entry in record.items()}


class Built(Exception):
    """Triton has walked through a kernel's functions; machine code is not made of it."""


@pytest.fixture
def as_triton_3_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton in which no function returns None where its value is used, as in 3.6 (torch 2.11), whichever is here."""
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    make = ASTSource.make_ir

    def make_ir(*given: Any, **named: Any) -> None:
        make(*given, **named)
        raise Built

    monkeypatch.setattr(ASTSource, "make_ir", make_ir)
    if triton.__version__.startswith("3.6."):
        return
    visit = CodeGenerator.visit_Return

    def visit_return(self: Any, node: Any) -> None:
        before = len(self.return_vals)
        visit(self, node)
        for value in self.return_vals[before:]:
            if isinstance(value, tl.constexpr) and value.value is None:
                raise TypeError("cannot convert None of type <class 'NoneType'> to tensor")

    monkeypatch.setattr(CodeGenerator, "visit_Return", visit_return)


@triton.jit
def _none_of_none(pointer):
    return tl.load(pointer) if pointer is not None else None


@triton.jit
def _uses_none(out, factor, GROUPS: tl.constexpr):
    factor = _none_of_none(factor)
    tl.store(out, 1.0)


@pytest.mark.parametrize("form", [*CASES, *other_forms()])
def test_no_function_returns_none_where_its_value_is_used(form: str, as_triton_3_6: None) -> None:
    launch = CASES[form][0]() if form in CASES else other_forms()[form]
    launch.kernel.device_caches.clear()
    with pytest.raises(Built):
        compiled(launch, 90)


def test_a_function_that_returns_none_is_noticed(as_triton_3_6: None) -> None:
    with pytest.raises(triton.CompilationError):
        compiled(Launch(_uses_none, 1, {"out": tensor(), "factor": None, "GROUPS": ()}), 90)


@pytest.mark.parametrize("architecture", chosen(ARCHITECTURES, [90]))
@pytest.mark.parametrize("copies", [False, True])
def test_adamw_over_32_shards_keeps_the_memory_busy(copies: bool, architecture: int) -> None:
    """48 of a multiprocessor's 64 warps or more, each with four loads of 16 bytes a thread on their way; an element is
    divided once. Of one launch for all 32, in blocks of four warps: 109 registers, 16 warps."""
    launch = adam(copies, 32, skipped=True)
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
        (launch,) = adams(True, 32)
    assert compiled(launch, 90).blocks(4) * 4 < 32


def test_a_row_with_an_odd_address_does_not_narrow_the_others() -> None:
    lists = [[torch.empty(4097)[1:], *(torch.empty(4096) for _ in range(2))], *([torch.empty(4096)] * 3,) * 3]
    whole, odd = update.adam_launches(*lists, [], [], tensor(), tensor(), **ADAMW)[::-1]
    assert [len(launch.arguments["parameters"]) for launch in (whole, odd)] == [2, 1]
    assert not problems("adamw", compiled(whole, 90))
    whole, odd = accumulate.launches(lists[0], lists[1], tensor(3), None, None)[::-1]
    assert compiled(whole, 90).wide_loads > compiled(odd, 90).wide_loads


def test_narrow_accesses_are_noticed() -> None:
    """Addresses that are no multiple of 16 bytes; the memory is never touched."""
    lists = [[torch.empty(9_437_185)[1:]] for _ in range(4)]
    (launch,) = update.adam_launches(*lists, [], [], tensor(), tensor(), **ADAMW)
    said = problems("adamw", compiled(launch, 90))
    assert any("loads of 128 bits" in problem for problem in said)
    assert any("stores of 128 bits" in problem for problem in said)


def test_spills_are_noticed() -> None:
    name = "flatten float32"
    assert problems(name, compiled(CASES[name][0](), 90, maxnreg=24)) == ["registers are spilled"]


def test_what_a_call_works_on_is_planned_once() -> None:
    """Later calls on tensors of the same form find the plan; of another form, dtype or alignment, they do not."""
    launch, again, other = (flattened(*dtypes) for dtypes in ((BF16, FP32), (BF16, FP32), (FP32, FP32)))
    assert launch.arguments["GROUPS"] is again.arguments["GROUPS"] is not other.arguments["GROUPS"]
    first, second = (adam(True).arguments["GROUPS"][0] for _ in range(2))
    assert first is second
    places = [torch.empty(4097)[:-1], torch.empty(4097)[1:]]
    even, odd = (accumulate.launches((), [place], tensor(1))[0].arguments["GROUPS"][0] for place in places)
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
            *[[tensor(16_384) for _ in range(many)] for _ in range(4)], [], [], tensor(), tensor(), **ADAMW
        )
    else:
        sources = [tensor(128, 128) for _ in range(many)]
        if kind == "flatten transposed":
            sources[:MOST] = [source.t() for source in sources[:MOST]]
        launches = flatten.launches(tensor(16_384 * many), sources, [16_384 * index for index in range(many)])
        assert sum(len(group.sizes) for launch in launches for group in launch.arguments["GROUPS"]) == many
    assert len(launches) == (-(-many // update.TENSORS) if kind == "adam" else 4)
    for launch in launches[:1]:
        found = compiled(launch, 90)
        assert not found.spilled and found.registers <= REGISTERS and found.wide_loads


@pytest.mark.parametrize("form", other_forms())
def test_every_other_form_compiles_without_spills(form: str) -> None:
    found = compiled(other_forms()[form], 90)
    assert not found.spilled and found.registers <= 255
