"""The tables of README.md, docs/ and bench/README.md are those that the committed results make."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from bench import RESULTS, run_all, tables
from bench.presets import PRESETS
from bench.rivals import RIVALS
from bench.start_up import paid

ROOT = Path(__file__).parents[2]


def fixture(ours: float, memory: float = 1.0) -> dict[str, Any]:
    """A result in which this package takes ``ours`` times what FSDP2 takes, and everybody else as much as FSDP2."""
    rivals = {
        rival.name: {
            "title": rival.title,
            "cpu": [[0.020 * number * (ours if rival.ours else 1)] * 2 for number in (1, 2, 3)],
            "wall": [[0.030 * number] * 2 for number in (1, 2, 3)],
            "peak_bytes": round(2**20 * (memory if rival.ours else 1)),
            "collectives": 5,
            "operators": 50,
        }
        for rival in RIVALS.values()
    }
    preset = {"layers": 24, "width": 64, "batch": 1, "context": 32, "rounds": 3, "steps": 2, "llama": False}
    conditions = {
        "world": 2,
        "device": "cpu",
        "threads a rank": 1,
        "load average before and after": [0.0, 2.0],
        "network": None,
    }
    return {
        "command": "fsdp-compiled bench --preset thin",
        "hardware": "2 cores",
        "versions": {"torch": "2.13.0"},
        "preset": preset,
        "conditions": conditions,
        "rivals": rivals,
    }


def first_step(layers: int, cold: float, warm: float) -> dict[str, Any]:
    facts = {"title": "this package, inductor", "first_step": {"cold": cold, "warm": warm}}
    return {"preset": {"layers": layers}, "rivals": {"ours": facts}}


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_documents_hold_what_the_committed_results_make(document: Path) -> None:
    text = document.read_text()
    assert tables.fill(text, tables.load()) == text, "run: python -m bench.tables"


def test_the_benchmarks_own_document_has_every_table() -> None:
    names = {name for _, name, _ in tables.BLOCK.findall((ROOT / "bench" / "README.md").read_text())}
    others = {"summary", "memory", "first-step", "goals", "start-up", "fewer-bytes", "many-ranks", "starting"}
    assert names == others | {*PRESETS}


def test_a_block_is_made_from_the_results_and_the_rest_is_left() -> None:
    results = {"thin": fixture(0.25)}
    text = "before\n<!-- bench: summary -->\nold\n<!-- end -->\nbetween\n<!-- bench: large -->\n<!-- end -->\nafter\n"
    filled = tables.fill(text, results)
    assert filled != text and tables.fill(filled, results) == filled
    assert "old" not in filled and filled.startswith("before\n") and filled.endswith("after\n")
    assert "| FSDP2 | 40.0 ms (1.00 ×) |" in filled and "| this package, eager | 10.0 ms (0.25 ×) |" in filled
    assert "<!-- bench: large -->\nNot measured yet.\n<!-- end -->" in filled
    assert tables.fill(filled, {"thin": fixture(0.5)}) != filled, "another result is another table"


def test_goals_are_met_missed_or_not_measured() -> None:
    results = {
        "thin": fixture(0.2),
        "small": fixture(0.8),
        "large": fixture(0.9, memory=0.9),
        "thin-first-step": first_step(24, 30.0, 6.0),
    }
    lines = [line.split(" | ") for line in tables.goals(results).splitlines()[2:]]
    assert [(line[-2], line[-1].strip(" |")) for line in lines] == [
        ("0.20", "met"),
        ("0.20", "met"),
        ("0.80", "**missed**"),
        ("0.90", "met"),
        ("0.90", "met"),
        ("not measured", ""),
        ("0.20", "met"),
    ]
    results["thin-4-first-step"] = first_step(4, 10.0, 6.0)
    assert "| 1.5 | 3.00 | **missed** |" in tables.goals(results)


def test_the_fastest_that_shards_is_the_one_that_counts() -> None:
    result = fixture(0.9)
    for facts in (result["rivals"]["fsdp2-compile"], result["rivals"]["ddp"]):
        facts["cpu"] = deepcopy(result["rivals"]["fsdp2"]["cpu"])
    result["rivals"]["fsdp2-compile"]["cpu"] = [
        [0.5 * cpu for cpu in turn] for turn in result["rivals"]["fsdp2"]["cpu"]
    ]
    result["rivals"]["ddp"]["cpu"] = [[0.1 * cpu for cpu in turn] for turn in result["rivals"]["fsdp2"]["cpu"]]
    assert "| 0.95 | 1.80 | **missed** |" in tables.goals({"large": result})


def test_what_is_committed_is_what_the_commands_make(tmp_path: Path) -> None:
    commands = run_all.COMMANDS
    names = [
        *tables.PRESETS,
        *tables.FIRST_STEPS,
        tables.CHECKPOINT,
        *tables.PRICED,
        *tables.HOSTS,
        *tables.MUON,
        *tables.LOOPS,
    ]
    names.append(tables.LOOP_FIRST_STEP)
    assert set(commands) == set(names)
    for name in commands:
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    assert list(tables.load(tmp_path)) == names


def test_goals_of_checkpoints_are_met_or_missed_by_both_clocks() -> None:
    seconds = {
        "copy": [{"stall": [0.1, 0.05]}],
        "ours": [{"stall": [0.2, 0.05], "save": [0.3, 0.3], "load": [0.2, 0.5]}],
        "dcp": [{"stall": [0.4, 0.4], "save": [0.4, 0.4], "load": [0.4, 0.4]}],
        "dcp-async": [{"stall": [0.3, 0.3], "save": [0.9, 0.9]}],
    }
    sizes = {"state_bytes": 1 << 20, "disk_bytes": {"ours": 2 << 20, "dcp": 2 << 20}}
    result = {**fixture(1.0), "checkpoint": {**sizes, "seconds": seconds}}
    text = tables.fill("<!-- bench: checkpoint -->\n<!-- end -->\n", {"checkpoint": result})
    assert "| 1.1 | 2.00 | **missed** | 1.00 | met |" in text
    assert "| 1 | 0.75 | met | 0.75 | met |" in text and "| 1 | 0.50 | met | 1.25 | **missed** |" in text
    assert "Not measured yet" in tables.fill("<!-- bench: checkpoint -->\n<!-- end -->\n", {})


def test_when_compiling_has_paid_follows_from_what_was_measured() -> None:
    measured = json.loads((RESULTS / "start-up.json").read_text())
    assert paid(measured["seconds"]["now"]) == measured["tokens until compiling has paid"]
