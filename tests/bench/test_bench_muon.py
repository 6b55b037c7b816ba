"""The table of `bench --measure muon`: medians of rounds, and ratios to one rank's share of the unsharded update."""

from typing import Any

import pytest

from bench import run_all, tables
from bench.muon import describe, ratio
from bench.options import MEASURES


def measured(ours: float) -> dict[str, Any]:
    """Unsharded, a step takes twice as long in each round as in the one before."""
    alone = [[[0.4 * slow, 0.2 * slow]] * 3 for slow in (1, 2, 4)]
    seconds = {"alone": alone} | {
        name: [[[wall * part, cpu * part] for wall, cpu in steps] for steps in alone]
        for name, part in (("ours", ours), ("fsdp2", 2.0))
    }
    conditions = {"world": 2, "load average before and after": [0.1, 1.9]}
    return {"matrices": 6, "bytes": 3 << 20, "conditions": conditions, "seconds": seconds}


@pytest.mark.parametrize(("ours", "share", "goal"), [(0.55, 1.1, "met"), (0.65, 1.3, "**missed**")])
def test_ratios_are_to_the_share_of_a_rank(ours: float, share: float, goal: str) -> None:
    found = measured(ours)
    assert ratio(found, "ours", 1) == pytest.approx(share) and ratio(found, "alone", 0) == pytest.approx(2)
    text = describe(found)
    assert f"{share:.2f}, {goal}." in text and "| FSDP2 | 800.0 ms | 4.00 | 1600.0 ms | 4.00 |" in text


def test_on_a_network_there_is_no_goal() -> None:
    found = measured(0.55)
    found["conditions"]["network"] = "0.25 Gb/s"
    text = describe(found)
    assert "on 2 ranks, 0.25 Gb/s, 3 rounds" in text and "Goal" not in text


def test_results_have_a_place_in_the_documents() -> None:
    assert "muon" in MEASURES and set(tables.MUON) <= run_all.COMMANDS.keys()
    made = {"muon": measured(0.55), "command": "fsdp-compiled bench", "hardware": "2 cores", "versions": {"torch": "2"}}
    text = tables.fill("<!-- bench: muon-256 -->\n<!-- end -->\n", {"muon-256": made})
    assert "6 matrices, 3.0 MiB, on 2 ranks, 3 rounds" in text and "`fsdp-compiled bench`, 2 cores, torch 2." in text
    for name in tables.MUON:
        assert any(f"<!-- bench: {name} -->" in document.read_text() for document in tables.DOCUMENTS)
