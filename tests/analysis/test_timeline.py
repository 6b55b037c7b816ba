"""Communication hides under compute: estimated from the program, and seen on a slow wire."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from fsdp_compiled import Policy
from fsdp_compiled.analysis import roofline
from fsdp_compiled.analysis.timeline import Span, Timeline, estimate
from tests.launch import launch
from tests.models import Stack
from tests.simulate import stages


def estimated(shard: int = 2, **policy: Any) -> Timeline:
    model = Stack(4, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = Policy(lower="eager", network=1.0, bucket_mb=0, **policy)
    found, plan = stages(model, optimizer, None, (torch.ones(1024, 256),), wanted, shard=shard)
    return estimate(found[-1], plan)


def test_gathers_ahead_make_the_estimate_shorter_and_compute_no_less() -> None:
    apart, ahead = estimated(prefetch=0), estimated(prefetch=1)
    assert ahead.end < 0.9 * apart.end
    assert ahead.busy("compute") == pytest.approx(apart.busy("compute"))
    assert ahead.busy("network") == pytest.approx(apart.busy("network"))
    assert ahead.end >= max(ahead.busy("compute"), ahead.busy("network"))


def test_nodes_that_are_alike_are_estimated_once_and_as_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[fx.Node] = []
    flops = roofline.flops
    monkeypatch.setattr(roofline, "flops", lambda node: looked.append(node) or flops(node))  # type: ignore[func-returns-value]
    counts = []
    for layers in (4, 8):
        model = Stack(layers, 16)
        # of another width in the middle: calls that differ in nothing but their layouts
        model.layers[1] = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
        found, plan = stages(
            model, None, None, (torch.ones(6, 16),), Policy(lower="eager", bucket_mb=0), kind="gradient"
        )
        graph = found[-1].graph
        looked.clear()
        together = list(roofline.seconds_of(graph, plan.machine))
        counts.append(sum(roofline._formula(node.target) is not None for node in looked))
        assert together == [roofline.seconds(node, plan.machine) for node in graph.nodes] and len(set(together)) > 5
    assert counts[0] == counts[1] > 5


def test_one_rank_has_nothing_on_the_wire() -> None:
    alone = estimated(shard=1)
    assert {span.lane for span in alone.spans} == {"compute"} and alone.end == pytest.approx(alone.busy("compute"))


def test_spans_of_a_lane_do_not_overlap() -> None:
    for lane in ("compute", "network"):
        spans = [span for span in estimated().spans if span.lane == lane]
        assert all(one.end <= other.start + 1e-12 for one, other in pairwise(spans))


def test_the_picture() -> None:
    drawn = Timeline(
        (Span("wire", "gather", 0.0, 0.5), Span("compute", "first", 0.25, 0.75), Span("wire", "x", 0.75, 1.0))
    )
    assert drawn.text(40).splitlines() == [
        "         0 ms" + f"{'1000 ms':>38}",
        "wire     |gather=============|..........x========|" + "|",
        "compute  |..........first==============|..........|",
        "wire 750 ms, compute 500 ms; 20% less than one after the other",
    ]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return launch(Path(__file__).parents[1] / "workers" / "overlap.py", 2)


def test_on_a_slow_wire_gathers_ahead_are_waited_for_less(seen: dict[str, Any]) -> None:
    """What a gather keeps a rank waiting, measured; a slower machine only hides more."""
    apart, ahead = seen["0"], seen["1"]
    assert apart["losses"] == ahead["losses"]
    assert apart["gathers"] == ahead["gathers"] == 9
    assert apart["wire"] == pytest.approx(ahead["wire"], rel=1e-3)
    assert apart["exposed gathers"] > 0.95 * apart["wire of gathers"], "nothing was to hide them"
    assert ahead["exposed gathers"] < 0.75 * ahead["wire of gathers"], ahead["picture"]
    # The control is the line above it: without prefetch, a step is compute and gathers in sequence.
    computed = ahead["step"] - ahead["exposed"]
    assert ahead["step"] < computed + ahead["wire"] - 0.25 * ahead["wire of gathers"], ahead["picture"]
