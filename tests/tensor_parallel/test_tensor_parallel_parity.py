"""Models that were cut beside FSDP2 with the same plan, and in Inductor; on 2 x 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import answers, launch, results_of

pytestmark = pytest.mark.exhaustive
WORKER = Path(__file__).parents[1] / "workers" / "tensor_parallel_parity.py"
results = results_of(WORKER, 4)


def test_llama_experts_and_a_vit_are_fsdp2_with_the_same_plan_to_the_bit(results: dict[str, Any]) -> None:
    found = answers(results, "same_plan")[0]
    assert set(found) == {"llama adamw", "experts adamw", "vit adamw", "experts sgd"}
    for name, one in found.items():
        assert one["bits"], (name, one)


def test_gradients_of_a_vit_are_parts_of_the_true_ones(results: dict[str, Any]) -> None:
    for found in answers(results, "gradients"):
        assert found["apart"] < 1e-6 < 1e-3 < found["other parts"]
        assert found["cuts"] == 10


def test_in_inductor_they_are_what_they_are_in_eager() -> None:
    found = answers(launch(WORKER, 4, "inductor"), "inductor")[0]
    assert set(found) == {"gpt", "llama", "experts", "vit"}
    for name, one in found.items():
        assert one["loss"] < 1e-5 and one["weights"] < 1e-5, (name, one)
