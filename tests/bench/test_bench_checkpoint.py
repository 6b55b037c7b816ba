"""The table of `bench --measure checkpoint`: medians, and medians of each round's ratios."""

from bench.checkpoint import TITLES, describe
from bench.options import MEASURES


def test_ratios_are_of_one_round() -> None:
    wall = {
        "copy": [{"stall": 0.01}, {"stall": 0.02}, {"stall": 0.04}],
        "ours": [{"stall": s, "save": 0.1, "load": 0.3} for s in (0.02, 0.04, 0.2)],
        "dcp": [{"stall": 0.2, "save": 0.2, "load": 0.6}] * 3,
        "dcp-async": [{"stall": 0.05, "save": 0.3}] * 3,
    }
    seconds = {
        name: [{what: [value, value / 10] for what, value in one.items()} for one in rows]
        for name, rows in wall.items()
    }
    text = describe({"state_bytes": 3 << 20, "disk_bytes": {"ours": 6 << 20, "dcp": 7 << 20}, "seconds": seconds})
    assert text.splitlines()[-4] == "| one copy of the state | 2 ms | 1.00 | – | – | – | – |", "of the processor"
    lines = dict(zip(TITLES, text.splitlines()[4:8], strict=True))
    assert lines["ours"] == "| this package, `save` | 40 ms | 2.00 | 100 ms | 0.50 | 300 ms | 0.50 |"
    assert lines["dcp-async"].endswith("| 50 ms | 2.50 | 300 ms | 1.50 | – | – |")
    assert "3 rounds; on the disk 6 MiB, DCP 7 MiB" in text
    assert "checkpoint" in MEASURES
