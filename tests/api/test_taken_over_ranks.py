"""Two real ranks: what one of them is refused, both are, with nothing changed; and live parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chosen import chosen, needs_torch, selected
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "taken_over.py"
REFUSED = {"hook": "2.weight has a hook (register_hook)", "state": "The optimizer's state 'step' differs"}
WAYS = ("zero3", "zero1", "ddp", "replicas")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    return launch(WORKER, 2, *selected(request, "way", "results"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_rank_refuses_is_refused_by_all_before_anything_is_changed(results: dict[str, Any], case: str) -> None:
    first, second = results[case]
    assert second["error"].startswith(f"ValueError: {REFUSED[case]}")
    assert first["error"].startswith("RankError: rank 1 failed") and REFUSED[case] in first["error"]
    for answer in (first, second):
        assert answer["same"] and answer["finite"]


@pytest.mark.parametrize("way", chosen(WAYS, ["zero3", "ddp", "replicas"]))  # zero1 has shards as zero3 has
def test_what_is_read_and_written_is_what_an_eager_model_has(results: dict[str, Any], way: str) -> None:
    assert results[way] == [[], []]


def test_gradients_of_a_call_are_means_over_ranks_and_draws_are_alike(results: dict[str, Any]) -> None:
    for answer in results["ranks"]:
        assert answer == {"same": True, "drawn": True, "elsewhere": True}


def test_a_state_dict_goes_through_distributed_checkpoint_and_becomes_whole(results: dict[str, Any]) -> None:
    for answer in results["saved"]:
        assert answer == {"full": True, "same": True, "apart": True}


@pytest.mark.parametrize("how", ["zero3", "ddp"])
def test_what_one_rank_writes_alone_is_an_error_on_both_until_the_other_does(results: dict[str, Any], how: str) -> None:
    for answer in results[f"{how} alone"]:
        assert answer["same"] and answer["finite"]
        for error in answer["errors"]:
            assert error.startswith("RankError: The ranks wrote to parameters otherwise, so nothing was done")


@pytest.mark.parametrize("how", ["zero3", "ddp"])
def test_evaluation_gathers_once_for_many_calls(results: dict[str, Any], how: str) -> None:
    for answer in results[f"{how} gathered"]:
        assert answer["good"]
        for error in answer["errors"][:2]:
            assert error.startswith("RuntimeError: Inside of sharded.gathered()"), error
        for error in answer["errors"][2:]:
            assert "0.weight was written to inside of gathered, while it was gathered, which would be lost" in error


@pytest.mark.parametrize("what", ["zero3 loaded", "ddp loaded", "own optimizer", "tp"])
def test_other_ways_to_write_are_those_of_an_eager_model(results: dict[str, Any], what: str) -> None:
    assert results[what] == [True, True]


WORDS = {
    "a layer with gradients": "would give it this rank's own gradient. Call the model",
    "pickle": "`pickle` is not possible. Save with",
    "numpy": "`numpy` is not possible. Take parameter.full_tensor()",
    "half": "Convert the model before compile_sharded",
    "rows": "cannot be redistributed",
    "past the model": "is read past the model",
    "through the model": "This Sequential was taken over by compile_sharded",
    "left": "0.weight.grad holds a gradient that a backward of your own left",
    "a copy": "0.weight of this Sequential is a copy of a parameter that is in shards already",
    "a collective": "a collective of one's own, `allreduce_`, is not possible",
    "transposed": "`t_` is not possible",
    "swapped": "Cannot swap",
    "one rank alone": "norm of 0.weight",
}


@pytest.mark.parametrize("what", WORDS)
def test_what_would_be_wrong_in_shards_is_refused_on_both(results: dict[str, Any], what: str) -> None:
    if what == "through the model":
        needs_torch((2, 12), "its Dynamo does not say what an exception says")
    for answer in results["refused"]:
        assert WORDS[what] in answer[what]
