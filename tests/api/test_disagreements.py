"""Ranks that disagree: an error on every rank that says who has what, nothing changed, and never a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chosen import chosen, selected
from tests.launch import launch

PATIENCE = 1.0  # of the watch, in the worker
WORKER = Path(__file__).parents[1] / "workers" / "disagreements.py"
DISAGREEMENTS = {
    "first_shapes": r"rank 0: step (float32[2, 4], float32[2, 2])",
    "known_shapes": r"rank 1: step (float32[3, 4], float32[3, 2])",
    "rates": "lr = 0.2",
    "other_calls": "rank 0: gradient (float32[2, 4]",
    "models": "float32[6, 4], unit root, trainable, group 0",
    "policies": "clip=2.0",
    "programs": "The program differs between rank 0 and rank 1",
    # here one rank waits in a collective that the other will never join: it must fail, with the other's reason
    "known_and_new_shapes": "rank 1: step (float32[3, 4]",
    "known_and_other_mode": "rank 1: step (float32[2, 4], float32[2, 2]), eval mode",
    "replaced_on_one": "rank 1: refused: 0.weight was replaced after compile_sharded",
    "odd_object": "rank 1: refused: The batch holds a builtins.object",
    "branches": "rank 1: step (int64[4], plain=True)",
    "collects_alone": "rank 1: full_state_dict",
    "autocast_on_one": "rank 1: step (float32[2, 4], float32[2, 2]), under autocast(cpu, bfloat16)",
    "known_autocast_on_one": "rank 1: step (float32[2, 4], float32[2, 2]), under autocast(cpu, bfloat16)",
    "inference_on_one": "rank 1: refused: step inside torch.inference_mode()",
    # here every rank waits in a collective, each in another
    "evaluates_alone": "rank 0: step (float32[2, 4], float32[2, 2])\n  rank 1: forward (float32[2, 4])\nMake the same",
    "accumulates_alone": "rank 1: accumulate (float32[2, 4], float32[2, 2])",
}
WATCHED = ("evaluates_alone", "accumulates_alone", "leaves_after_another_call")
ONE_FAILS = {
    "not_a_module": "model is a str; expected a torch.nn.Module",
    "losses": "The loss has shape [2, 2]; expected a scalar",
}
REFUSED_BY_ALL = {
    "mesh_axes": 'expected one axis, which shards, or two named ("replicate", "shard")',
    "mesh_size": "mesh holds 1 ranks, but the world has 2",
}
SHOWN = (
    "many_rates", "options_then_alike", "first_shapes_then_good", "replaced_on_both", "inference_on_both", "odd_rows",
    "leaves_after_another_call", "late", "loop_evaluates_more_on_the_first", "loop_evaluates_more_on_the_second",
)  # fmt: skip

# Ranks that differ in what another of the cases has too, at another time; `many_rates` has forty that differ.
REPEATED = ("known_shapes", "other_calls", "known_autocast_on_one", "inference_on_one", "rates")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    return launch(WORKER, 2, *dict.fromkeys([*selected(request, "case", "results"), *SHOWN]))


@pytest.mark.parametrize("case", chosen(DISAGREEMENTS, [case for case in DISAGREEMENTS if case not in REPEATED]))
def test_a_disagreement_is_an_error_on_every_rank(results: dict[str, Any], case: str) -> None:
    for answer in results[case]:
        assert answer["error"] == "RankError", answer
        assert DISAGREEMENTS[case] in answer["message"]
        assert case in WATCHED or answer["notes"] in ([], ["unchanged: True"])


@pytest.mark.parametrize("case", WATCHED)
def test_ranks_whose_collectives_never_pair_up_are_told_in_seconds(results: dict[str, Any], case: str) -> None:
    for answer in results[case][: 1 if case == "leaves_after_another_call" else 2]:
        assert answer["error"] == "RankError", answer
        (note,) = answer["notes"]
        assert float(note.removeprefix("seconds: ")) < 60  # the process group's patience is 30 minutes


@pytest.mark.parametrize("more", [0, 1])
def test_a_loop_that_evaluates_more_on_one_rank_is_an_error_on_both(results: dict[str, Any], more: int) -> None:
    for answer in results[f"loop_evaluates_more_on_the_{('first', 'second')[more]}"]:
        first, then = answer["result"]["first"], answer["result"]["then"]
        assert first.startswith("RankError: The ranks made different calls"), answer
        assert f"rank {more}: forward FSDPSequential" in first and f"rank {1 - more}: training FSDPSeq" in first
        assert then.startswith("RankError: An earlier call failed for good:\nThe ranks made different calls"), answer


def test_a_rank_that_is_late_is_waited_for(results: dict[str, Any]) -> None:
    first, second = (answer["result"] for answer in results["late"])
    assert first["waited"] > 2.0 > PATIENCE  # for longer than the watch takes to look
    assert first["watched"] and second["watched"]


def test_a_call_that_no_error_ends_ends_the_process_with_the_reason() -> None:
    with pytest.raises(RuntimeError) as raised:
        launch(WORKER, 2, "unstoppable", timeout=300)
    output = str(raised.value)
    assert "exit code 1" in output and "no end after" not in output
    assert "waits here:" in output and "in unstoppable" in output and "in step" in output
    assert "RankError: The ranks made different calls" in output and "rank 1: forward (float32[2, 4])" in output


@pytest.mark.parametrize("case", ONE_FAILS)
def test_one_ranks_failure_is_told_to_all(results: dict[str, Any], case: str) -> None:
    failed, other = results[case]
    assert failed["error"] in ("ValueError", "CaptureError") and ONE_FAILS[case] in failed["message"]
    assert other["error"] == "RankError" and ONE_FAILS[case] in other["message"]
    assert "rank 0 failed" in other["message"]


@pytest.mark.parametrize("case", REFUSED_BY_ALL)
def test_a_mesh_that_does_not_fit_is_refused(results: dict[str, Any], case: str) -> None:
    for answer in results[case]:
        assert answer["error"] == "ValueError" and REFUSED_BY_ALL[case] in answer["message"]


def test_what_every_rank_refuses_is_refused_as_on_one(results: dict[str, Any]) -> None:
    for answer in results["replaced_on_both"]:
        assert answer["error"] == "ValueError" and "0.weight was replaced" in answer["message"]
        assert answer["notes"] == ["unchanged: True"]


def test_inference_mode_on_every_rank_is_refused_as_on_one(results: dict[str, Any]) -> None:
    for answer in results["inference_on_both"]:
        assert answer["error"] == "ValueError" and "step inside torch.inference_mode()" in answer["message"]
        assert answer["notes"] == ["unchanged: True"]


def test_ranks_go_on_after_new_shapes_that_differed(results: dict[str, Any]) -> None:
    for answer in results["first_shapes_then_good"]:
        assert answer["result"] == {"first": "RankError", "finite": True}


def test_options_that_differ_once_are_no_lasting_disagreement(results: dict[str, Any]) -> None:
    for answer in results["options_then_alike"]:
        assert "rank 1: step (float32[2, 4], float32[2, 2]), with 0.weight_decay=0.2" in answer["result"]["first"]
        assert answer["result"]["finite"]


def test_rates_that_differ_are_always_an_error_before_anything_is_updated(results: dict[str, Any]) -> None:
    for answer in results["many_rates"]:
        assert answer["result"] == {"raised": 40, "unchanged": 40, "goes on": True}


def test_ranks_whose_sizes_ask_for_different_programs_are_told(results: dict[str, Any]) -> None:
    first, second = results["odd_rows"]
    assert (first["error"], second["error"]) == ("RankError", "ValueError")
    for answer in (first, second):
        assert "asks for certain sizes" in answer["message"] and "Mod(s" in answer["message"]
        assert answer["notes"] == ["unchanged: True"]
