"""What ranks share and what each has alone: weights, dropout, shards, sizes, graphs, gradients, the process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chosen import examples
from tests.launch import launch, results_of

WORKERS = Path(__file__).parents[1] / "workers"
results = results_of(WORKERS / "what_ranks_share.py", 2, "seeds", "dropout", "counts", "sizes", "graphs", "idle")


def test_rank_0s_weights_win(results: dict[str, Any]) -> None:
    first, second = (answer["result"] for answer in results["seeds"])
    assert first["rank 0's weights"] and first["on this rank"]
    assert second["on this rank"] == []


def test_dropout_differs_by_rank_and_step_and_repeats_under_a_seed(results: dict[str, Any]) -> None:
    for answer in results["dropout"]:
        assert all(answer["result"].values()), answer


def test_a_rank_holds_its_share_and_no_more(results: dict[str, Any]) -> None:
    for answer in results["counts"]:
        result = answer["result"]
        assert result["held"] == result["planned"] == result["everything"] // 2
        assert result["gathers"] == 2  # of two units; backward needs neither again: the first has no input gradient
        assert result["captures"] == 1


def test_ranks_with_different_rows_share_one_program(results: dict[str, Any]) -> None:
    first, second = (answer["result"] for answer in results["sizes"])
    assert first["captures"] == second["captures"] == 1
    right, wrong = first["off"]
    assert right <= 1e-6 < wrong  # the mean over all rows is another number: each rank counts the same


def test_collectives_are_captured_by_all_ranks_or_by_none(results: dict[str, Any]) -> None:
    for answer in results["graphs"]:
        result = answer["result"]
        assert result["same"] and result["others"] and result["moved"]
        assert result["untried"] == [4, True], "one rank has no memory for the trial: all launch without it"
        graphed, broken, refused = result["replays"]
        # accumulate: 4 calls of two shapes, none launched; last: 8 of two shapes, the third of each on is
        assert graphed == result["log"].count("launch") == 4 and broken == refused == 0
        assert result["captured"] == 2 and result["broken"] == []
        assert min(result["gathers"], result["reductions"]) >= result["captured"]
        assert result["waits"] >= result["gathers"] + result["reductions"]


def test_what_no_batch_or_one_ranks_alone_reaches_is_as_in_fsdp2_and_ddp(results: dict[str, Any]) -> None:
    first, second = (answer["result"] for answer in results["idle"])
    different = first["different"]
    assert different["fsdp2"] == different["ddp"] == []  # bit for bit
    assert first["idle gradients"] == second["idle gradients"] == 0.0
    moved = {name for name in different["start"] if not name.startswith("idle")}
    assert different["start"] == sorted(moved) and len(moved) == 7  # idle is not even decayed; all else is
    assert "experts.0.weight" in different["alone"] and "experts.1.weight" in different["alone"]  # control


def test_the_process_group_is_started_and_closed_for_the_user() -> None:
    answer = launch(WORKERS / "exits.py", 2, ends=True)
    assert answer["backend"] == "gloo" and answer["world"] == 2
    assert answer["losses"][1] < answer["losses"][0]


def test_a_process_leaves_in_peace_while_something_refers_to_its_process_group() -> None:
    """Closed with PyTorch's own function, as a control, one such run in three or four is aborted; hence several."""
    for _ in range(examples(2, 6)):
        assert launch(WORKERS / "held.py", 4, "closed", ends=True) == "left"
