"""Calls after ``dist.destroy_process_group()``, and an exception of one rank's own in a forward that is traced anew."""

from __future__ import annotations

from pathlib import Path

from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "ended_group.py"


def test_what_ranks_hear_of_an_ended_group_and_of_an_exception_of_one() -> None:
    results = launch(WORKER, 2, "of_a_step", "of_a_module", "stop_on_both", "stop_on_one")
    for case, by_dtensor in (("of_a_step", 0), ("of_a_module", 1)):
        for one in (one["result"] for one in results[case]):
            said = [text for text in one.values() if text.startswith("RankError: There is no process group any more")]
            assert len(said) == len(one) - by_dtensor, one
    for one in results["stop_on_both"]:
        assert one["result"] == {"first": "Stop: enough", "then": "None"}
    first, second = results["stop_on_one"]
    assert first["error"] == "RankError" and "Stop: enough" in first["message"], first
    assert (second["error"], second["message"]) == ("Stop", "enough") and "rank 0: training" in second["notes"][0]
