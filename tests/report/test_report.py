"""report.html: what it says is what the program has, it asks for nothing, and a browser shows it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_compiled.report
from fsdp_compiled import Policy
from fsdp_compiled.analysis import memory, peak_memory, timeline
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.analysis.timeline import WAIT, Timeline
from fsdp_compiled.ir.nodes import is_collective
from fsdp_compiled.ir.program import Program
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.report import dump
from fsdp_compiled.report.dump import compared
from fsdp_compiled.report.page import figures, starts
from tests.browser import Page, browser, found
from tests.models import Stack
from tests.simulate import stages

HERE = Path(fsdp_compiled.report.__file__).parent
# Of uplot-1.6.32.tgz, as the npm registry has it.
UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"


@dataclass
class Dumped:
    folder: Path
    stages: tuple[Program, ...]
    plan: Plan
    memory: Memory
    time: Timeline

    @property
    def text(self) -> str:
        return (self.folder / "report.html").read_text("utf-8")

    @property
    def data(self) -> dict[str, Any]:
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.text, re.DOTALL)
        assert found is not None
        return json.loads(found[1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=[24, 126])
def dumped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    folder = tmp_path_factory.mktemp(f"layers{request.param}")
    policy = Policy(lower="eager", bucket_mb=0, network=1.0)
    model = Stack(request.param, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs, plan = stages(model, optimizer, None, (torch.ones(256, 32),), policy, shard=4)
    taken = peak_memory.predict(programs[-1], plan, memory.persistent(plan), "fake")
    dump.write(folder, plan, programs, taken)
    return Dumped(folder, programs, plan, taken, timeline.estimate(programs[-1], plan))


class Tags(HTMLParser):
    """Tags that are open, and addresses that are asked for."""

    EMPTY = ("meta", "input", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "action", "data")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_is_one_whole_file_that_asks_for_nothing(dumped: Dumped) -> None:
    text = dumped.text
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert not tags.open and not tags.asked and len(tags.ids) == len(set(tags.ids))
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|\bimport\(", text)
    assert "default-src 'none'" in text and "Permission is hereby granted" in text
    assert len(text) < 10_000_000 and not re.search(r"/\* [\w.]+ \*/", text), "a file was not put in"


def test_what_is_embedded_is_the_one_version() -> None:
    assert hashlib.sha256((HERE / "uPlot.iife.min.js").read_bytes()).hexdigest() == UPLOT
    assert "v1.6.32" in (HERE / "uPlot.iife.min.js").read_text()[:80] and "MIT" in (HERE / "uPlot.LICENSE").read_text()


def test_its_figures_are_the_programs(dumped: Dumped) -> None:
    data, program, time = dumped.data, dumped.stages[-1], dumped.time
    head = data["headline"]
    assert head["seconds"] == time.end > 0 and head["peak"] == dumped.memory.peak.nbytes
    assert head["exposed"] == pytest.approx(time.end - time.busy("compute")) and 0 < head["exposed"] < time.end
    sent = [node.name for node in program.graph.nodes if node.op == "call_function" and is_collective(node)]
    drawn = data["predicted"]
    assert [name for name in drawn["node"] if name] == sent
    lanes = {lane: sum(e - s for s, e, one in zip(drawn["start"], drawn["end"], drawn["lane"]) if one == lane)
             for lane in set(drawn["lane"])}  # fmt: skip
    assert lanes["compute"] == pytest.approx(time.busy("compute"))
    assert lanes["gathers"] + lanes["reductions"] == pytest.approx(time.busy("network"))
    rows = data["units"]
    assert sum(row["exposed"] for row in rows) == pytest.approx(head["exposed"])
    assert [row["unit"] for row in rows] == [unit.name for unit in dumped.plan.units]
    assert sum(row["held"] for row in rows) == dumped.plan.persistent_bytes


def test_memory_by_kind_is_the_memory_at_every_moment(dumped: Dumped) -> None:
    data, moments = dumped.data["memory"], {moment.node: moment.nbytes for moment in dumped.memory.timeline}
    sums = [sum(column) for column in zip(*data["kinds"].values())]
    assert sums == [moments[node] for node in data["nodes"]] and max(sums) == dumped.memory.peak.nbytes
    assert data["times"] == sorted(data["times"]) and data["times"][-1] <= dumped.time.end
    assert min(map(min, data["kinds"].values())) >= 0
    peak = dumped.data["peak"]
    at = data["nodes"].index(peak["node"])
    for kind, size in dumped.memory.at_peak().items():
        assert data["kinds"][kind][at] == size
    assert [one["bytes"] for one in peak["tensors"]] == sorted((one["bytes"] for one in peak["tensors"]), reverse=True)
    assert len(peak["tensors"]) == 10
    assert any(re.match(r"models.py:\d+, in forward: x = layer\(x\)", one["line"]) for one in peak["tensors"])


def test_nodes_are_reached_in_order(dumped: Dumped) -> None:
    nodes = [node for node in dumped.stages[-1].graph.nodes if node.op == "call_function"]
    reached = dict(zip((node.name for node in nodes), starts(dumped.time, nodes), strict=True))
    assert list(reached.values()) == sorted(reached.values())
    computed = [span for span in dumped.time.nodes if span.lane == "compute"]
    assert len(computed) > 50 and all(reached[span.node] == span.start for span in computed)


def test_who_holds_what_adds_up_to_each_parameter(dumped: Dumped) -> None:
    held = dumped.data["holders"]
    for buffer in held["buffers"]:
        for _, offset, size, _ in buffer["slots"]:
            parts = [
                max(0, min(offset + size, (rank + 1) * buffer["each"]) - max(offset, rank * buffer["each"]))
                for rank in range(held["ranks"])
            ]
            assert sum(parts) == size


def test_every_pass_has_its_differences_and_the_figures_are_counted(dumped: Dumped) -> None:
    texts = {one["name"]: one["text"] for one in dumped.data["texts"]}
    assert {"program", "plan", "memory", "what runs"} < texts.keys()
    assert {program.history[-1] for program in dumped.stages[1:]} < texts.keys()
    assert "all_gather along shard" in texts["gather"] and "\n+" in texts["gather"]
    layers = len(dumped.plan.units)
    assert f"×{layers}" in texts["plan"]
    counted = json.loads((dumped.folder / "figures.json").read_text())
    last, before = counted[dumped.stages[-1].history[-1]], counted["capture"]
    assert before["collectives"] == {} and last["peak bytes"] == dumped.memory.peak.nbytes
    assert last["collectives"]["reduce_scatter along shard"]["count"] == layers
    assert last["exposed seconds"] == dumped.time.busy_nodes(WAIT)


def test_a_program_that_cannot_be_predicted_has_a_page_too(dumped: Dumped) -> None:
    data = figures(dumped.plan, dumped.stages[-1], memory.unpredicted("nobody can"), dumped.time)
    assert data["peak"] is None and data["headline"]["peak"] is None and data["memory"]["times"] == []


def test_two_sides_compared() -> None:
    one = {"nodes": 4, "collectives": {"all_gather along shard": {"count": 1, "bytes": 1024}}, "peak bytes": 2048}
    other = {"nodes": 4, "collectives": {}, "peak bytes": 1024}
    text = compared(one, other, "a", "b")
    assert [line.split() for line in text] == [
        ["a", "b"],
        "all_gather along shard 1, 1.0 KiB 0, 0 B -1, -1.0 KiB".split(),
        "peak 2.0 KiB 1.0 KiB -1.0 KiB".split(),
    ]
    assert compared(one, one, "a", "b") == ["counts, bytes and peak are the same"]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if found() is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium, or CHROMIUM=PATH)")
    with browser() as opened:
        yield opened


HOT = "[...document.querySelectorAll('.hot')].length"
RANGE = "[lanes.scales.x.min, lanes.scales.x.max]"


@pytest.mark.parametrize(("width", "dark"), [(1300, False), (1300, True), (420, False)])
def test_a_browser_shows_it(dumped: Dumped, page: Page, width: int, dark: bool, tmp_path: Path) -> None:
    page.events.clear()
    page.size(width, 900)
    page.dark(dark)
    page.open(dumped.folder / "report.html")
    paper = page.ask("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is not dark
    assert page.ask("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than its window"
    # hover: the middle of the compute lane names a unit, in the tip, the table and the text
    x, y = page.ask(
        "(b => [b.x + b.width / 2, b.y + 10])(document.querySelector('#lanes .u-over').getBoundingClientRect())"
    )
    assert page.ask(HOT) == 0
    page.hover(x, y)
    assert "compute" in page.ask("$('tip').textContent") or "exposed" in page.ask("$('tip').textContent")
    assert page.ask("hot") in page.ask("$('tip').textContent") and page.ask(HOT) > 0
    page.hover(1, 1)
    # keys: zoom and move both charts, the whole step again, the next unit, the theme
    whole = page.ask(RANGE)
    page.key("+")
    zoomed = page.ask(RANGE)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.key("ArrowRight")
    moved = page.ask(RANGE)
    assert moved[0] > zoomed[0] and page.ask("[memory.scales.x.min, memory.scales.x.max]") == moved
    page.key("0")
    assert page.ask(RANGE) == whole
    page.key("e")
    assert page.ask("lanes.scales.x.max - lanes.scales.x.min") < whole[1] - whole[0]
    page.key("n")
    assert page.ask("hot") == page.ask("names[0]")
    page.key("t")
    assert page.ask("getComputedStyle(document.body).backgroundColor") != paper
    # search leaves the lines that have it, and marks it
    page.key("/")
    page.key("r")
    page.key("e")
    page.key("d")
    lines = page.ask("[...document.querySelectorAll('#text .row')].map(row => row.textContent.toLowerCase())")
    assert lines and all("red" in line for line in lines) and page.ask("document.querySelectorAll('mark').length") > 0
    page.key("Escape")
    # tabs, by keyboard
    page.ask("document.querySelector('[role=tab]').focus()")
    page.key("ArrowRight")
    assert page.ask("document.querySelector('[aria-selected=true]').textContent") == "plan"
    # repeated blocks are one row, which opens
    shown = "[...$('units').tBodies[0].rows].filter(row => !row.hidden).length"
    assert page.ask(shown) < 5
    page.ask("document.querySelector('tr.folded').click()")
    assert page.ask(shown) >= len(dumped.plan.units)
    page.picture(tmp_path / "page.png")
    assert page.errors() == [] and {*page.requests()} == {(dumped.folder / "report.html").resolve().as_uri()}


@pytest.mark.parametrize("stored", [{"offload": True}, {"memory_gb": 0.004}])
def test_copies_from_and_to_the_host_have_a_lane(stored: dict[str, Any]) -> None:
    policy = Policy(lower="eager", bucket_mb=0, **stored)
    model = Stack(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs, plan = stages(model, optimizer, None, (torch.ones(256, 32),), policy, shard=4)
    taken = peak_memory.predict(programs[-1], plan, memory.persistent(plan), "fake")
    drawn = figures(plan, programs[-1], taken, timeline.estimate(programs[-1], plan))
    if "offload" in stored:
        assert "host" in drawn["predicted"]["lane"] and sum(unit["host"] for unit in drawn["units"]) > 0
    assert all(set(drawn["predicted"]["lane"]) <= {*unit, "compute"} for unit in drawn["units"])
