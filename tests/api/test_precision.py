"""Mixed precision against FSDP2 with the same ``MixedPrecisionPolicy``, bit for bit, and the bytes on the wire.

With two ranks a sum has two terms, so equal casts in equal places leave equal bits; what is cast elsewhere shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chosen import chosen, selected
from tests.launch import launch
from tests.workers.precision import CASES, OVERFLOWS, SCALE, STEPS

Record = dict[str, Any]


CHOSEN = ("bf16", "bf16, reduced in fp32", "fp32, reduced in bf16", "fp16, scaled", "fp16, scaled, copies")


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> dict[str, Record]:
    names = {"fp16, scaled", "fp32, reduced in bf16", *selected(request, "name", "two")}
    return launch(Path(__file__).parents[1] / "workers" / "precision.py", 2, *sorted(names))


@pytest.mark.parametrize("name", chosen(CASES, CHOSEN))
def test_two_ranks_are_bitwise_fsdp2_with_the_same_policy(name: str, two: dict[str, Record]) -> None:
    record = two[name]
    assert len(record["losses"]) == STEPS
    assert record["reference"]["unequal"] == []
    broken = {text.startswith("loss ") for text in record["control"]["unequal"]}
    assert broken == {True, False}, "the control's losses and weights both have to differ"


@pytest.mark.parametrize("name", chosen(CASES, CHOSEN))
def test_each_cast_comes_before_its_wire(name: str, two: dict[str, Record]) -> None:
    precision, record = CASES[name].precision, two[name]
    compute = precision.param_dtype or torch.float32
    wire = precision.reduce_dtype or compute
    elements = two["fp32, reduced in bf16"]["wire"]["all_gather"] // 4
    assert record["shards"] < elements < 2 * record["shards"]  # twice a step, but for the root
    assert record["wire"]["all_gather"] == elements * compute.itemsize
    assert record["wire"]["reduce_scatter"] == 2 * record["shards"] * wire.itemsize


def test_fsdp2_under_a_grad_scaler_skips_the_step_that_overflows_and_so_does_the_program(
    two: dict[str, Record],
) -> None:
    record = two["fp16, scaled"]
    assert record["overflows"] == 1
    assert record["losses"][OVERFLOWS] > 1e4 and SCALE.init * record["losses"][OVERFLOWS] > 65504
    assert max(record["losses"][OVERFLOWS + 1 :]) < 1
