"""Two real ranks: what fails on one of them while a model is taken over or collected is an error on both, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import results_of

WORKER = Path(__file__).parents[1] / "workers" / "half_taken.py"
SOON = 20.0  # seconds on a busy machine; the process group's own patience is 30 minutes
MEMORY = "tried to allocate more than there is"
TAKEN = {  # which ranks fail, and with what
    "init_1": ((1,), "LookupError", "no weights for rank 1"),
    "init_0": ((0,), "LookupError", "no weights for rank 0"),
    "init_both": ((0, 1), "LookupError", "no weights for rank"),
    "init_of_buffers": ((1,), "LookupError", "no weights for rank 1"),
    "shards": ((1,), "OutOfMemoryError", MEMORY),
    "taken": ((1,), "OutOfMemoryError", MEMORY),
}
COLLECTED = {
    "collected_hook": (0, "LookupError", "the hook's own reason"),
    "collected_copy": (0, "OutOfMemoryError", MEMORY),
    "collected_first": (1, "OutOfMemoryError", MEMORY),
}
results = results_of(WORKER, 2, "control", *TAKEN, "brought", *COLLECTED)


@pytest.mark.parametrize("case", TAKEN)
def test_a_failure_while_the_model_is_taken_over_is_an_error_on_every_rank(results: dict[str, Any], case: str) -> None:
    failing, error, message = TAKEN[case]
    for rank, answer in enumerate(answer["result"] for answer in results[case]):
        said = answer["notes"] if rank in failing else answer["message"]
        assert answer["error"] == (error if rank in failing else "RankError")
        assert message in answer["message"] and "half taken over" in said and "Build it and its optimizer again" in said
        assert f"rank {rank if rank in failing else failing[0]}" in said and answer["seconds"] < SOON


def test_a_model_that_is_built_again_trains_as_one_that_never_failed(results: dict[str, Any]) -> None:
    control = results["control"][0]["result"]
    assert control["error"] == "" and len(control["weights"]) == 5
    for case in TAKEN:
        assert results[case][0]["result"]["weights"] == control["weights"]


def test_optimizer_state_that_one_rank_alone_brings_is_refused_with_nothing_changed(results: dict[str, Any]) -> None:
    for answer in (answer["result"] for answer in results["brought"]):
        assert answer["error"] == "RankError" and "optimizer's state of weight: exp_avg" in answer["message"]
        assert answer["untouched"] and answer["seconds"] < SOON


@pytest.mark.parametrize("case", COLLECTED)
def test_a_failure_in_full_state_dict_is_an_error_on_every_rank_and_all_go_on(
    results: dict[str, Any], case: str
) -> None:
    failing, error, message = COLLECTED[case]
    for rank, answer in enumerate(answer["result"] for answer in results[case]):
        assert answer["error"] == (error if rank == failing else "RankError") and message in answer["message"]
        assert rank == failing or f"rank {failing} failed" in answer["message"]
        assert answer["same"] and answer["finite"] and answer["seconds"] < SOON
