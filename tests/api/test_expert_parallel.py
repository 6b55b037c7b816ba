"""Expert parallelism: experts in parts along tp, and tokens sent to them by all-to-all, on 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import answers, launch, results_of

WORKER = Path(__file__).parents[1] / "workers" / "expert_parallel.py"
results = results_of(WORKER, 4)


@pytest.fixture(scope="module")
def refused() -> dict[str, Any]:
    return launch(WORKER, 2)


@pytest.mark.parametrize("mesh", ["2 x 2", "1 x 4"])
def test_experts_that_tokens_are_sent_to_train_as_in_one_process(results: dict[str, Any], mesh: str) -> None:
    found = answers(results, "values")
    assert all(found[0][mesh][what] < 1e-5 for what in ("loss", "norm", "weights")), found[0]
    assert found[0]["control"]["weights"] > 1e-3  # tokens that stay where they are
    assert all(one[f"{mesh} copies"] for one in found)


@pytest.mark.parametrize("mesh", ["2 x 2", "1 x 4"])
def test_exchanges_are_collectives_along_tp_like_others(results: dict[str, Any], mesh: str) -> None:
    found = answers(results, "values")[0]
    counts = found[f"{mesh} counts"]
    assert counts["all_to_all_single tp"] == 4  # there and back, in forward and in backward
    assert counts["all_gather_into_tensor tp"] == 2  # each rank's tokens; and their gradients
    assert counts["all_reduce tp"] == 3  # the router's weight and bias; losses and norms
    assert "all_to_all_single: 1.5 KiB -> 1.5 KiB, along tp" in found["program"]


REFUSED = {
    "router": "experts.router.weight, experts.router.bias are whole on every rank along the tp axis, but",
    "unequal": "The model sends pieces of different sizes along tp (_c10d_functional.all_to_all_single.default, [7, 1]",
    "other group": "over a process group of its own. A program knows the axes of the mesh alone",
    "distributed.nn": "Use torch.distributed._functional_collectives.all_to_all_single instead",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_to_be_right_is_refused_on_every_rank(
    results: dict[str, Any], refused: dict[str, Any], case: str
) -> None:
    if case == "distributed.nn" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 traces it, and the values are right")
    for one in answers(results, "other_group") if case == "other group" else answers(refused, "refusals"):
        assert one[case].startswith("CaptureError: ") and REFUSED[case] in one[case], one[case]


@pytest.mark.exhaustive
def test_inductor_gives_the_same() -> None:
    found = answers(launch(WORKER, 4, "inductor"), "inductor")[0]
    assert all(found[what] < 1e-5 for what in ("loss", "norm", "weights")), found
