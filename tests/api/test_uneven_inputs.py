"""Ranks with uneven numbers of batches: joined, they are one process on all rows; else all are told who was short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_compiled import Policy, compile_sharded
from tests.launch import launch, results_of
from tests.toys import EAGER, batches, build, mse, sgd

WORKER = Path(__file__).parents[1] / "workers" / "uneven_inputs.py"
results = results_of(WORKER, 2, "joined", "joined_on_shards", "joined_late", "joined_differently", "joined_refusing")


@pytest.mark.parametrize("case", ["joined", "joined_on_shards"])
def test_five_batches_and_three_are_one_process_on_all_rows(results: dict[str, Any], case: str) -> None:
    first, second = (answer["result"] for answer in results[case])
    assert (first["shadowed"], second["shadowed"]) == (0, 2)
    assert first["steps"] == second["steps"] == 6
    assert first["captures"] == second["captures"] == 1
    assert max(first["losses"], second["losses"]) <= 1e-6
    right, wrong = first["off"]
    assert right <= 1e-5 < 1e-3 < wrong


def test_a_rank_without_any_batch_shadows_calls_that_it_has_never_made(results: dict[str, Any]) -> None:
    first, second = (answer["result"] for answer in results["joined_late"])
    assert (first["shadowed"], second["shadowed"]) == (0, 1)
    assert first["value"] <= 1e-6
    right, wrong = first["off"]
    assert right <= 1e-5 < 1e-3 < wrong


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("joined_differently", "rank 1: step (float32[3, 4], float32[3, 2])"),
        ("joined_refusing", "rank 0: has run out of batches\n  rank 1: refused: The batch holds a builtins.object"),
    ],
)
def test_what_cannot_be_joined_is_an_error_on_every_rank(results: dict[str, Any], case: str, message: str) -> None:
    for answer in results[case]:
        assert answer["error"] == "RankError" and message in answer["message"], answer
        assert answer["notes"] == ["unchanged: True"]


def test_a_rank_that_ends_early_is_named() -> None:
    answer = launch(WORKER, 2, "ends_early")
    assert answer["error"] == "RankError", answer
    assert "A rank is gone, so nothing was updated" in answer["message"]
    assert "rank 0: step (float32[4, 4]" in answer["message"] and "rank 1: gone after 2 calls" in answer["message"]
    assert "sharded.join()" in answer["message"]
    assert answer["notes"] == ["unchanged: True"]


def test_join_on_one_process_changes_nothing_and_needs_weights() -> None:
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=EAGER)
    with pytest.raises(ValueError, match=r'Pass Policy\(weigh="rows"\)'), sharded.join():
        pass
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=Policy(lower="eager", weigh="rows"))
    with sharded.join() as ended:
        sharded.step(*batches(1)[0])
        with pytest.raises(RuntimeError, match="join inside join"), sharded.join():
            pass
        for call in (
            sharded.full_state_dict, sharded.full_optimizer_state_dict, sharded.state_dict,
            lambda: sharded.load_full_state_dict({}), lambda: sharded.load_full_optimizer_state_dict({}),
            lambda: sharded.load_state_dict({}), lambda: sharded.save("somewhere"), lambda: sharded.load("somewhere"),
            lambda: sharded.export("somewhere"), lambda: sharded.import_weights("somewhere"),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"inside join: the other ranks may still train\. Call it after"):
                call()
    assert ended.shadowed == 0 and int(sharded.state.step) == 1
