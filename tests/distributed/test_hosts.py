"""Training on two hosts with a network between them: what it sends, a cable that is pulled, a host that dies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.hosts import Host, hosts, missing, torchrun
from tests.launch import environment, launch
from tests.open_sites import Site, all_do, end
from tests.workers.open_sites import EVERY

WORKER = Path(__file__).parents[1] / "workers" / "hosts.py"
LIMIT = 150.0  # seconds
STARTED = 4  # steps

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no hosts can be made here: {missing()}")


class Job:
    """The worker under torchrun, on two hosts with so many ranks each."""

    def __init__(self, folder: Path, among: list[Host], nproc: int, kind: str, steps: int, fewest: int | None) -> None:
        self.folder, self.world = folder, nproc * len(among)
        arguments = [str(WORKER), str(folder / "result.json"), str(folder), kind, str(steps)]
        with (folder / "log.txt").open("wb") as log:
            self.agents = torchrun(among, nproc, arguments, fewest, env=environment(), stdout=log, stderr=log)

    def said(self, rank: int) -> list[dict[str, Any]]:
        file = self.folder / f"rank{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def errors(self, rank: int) -> list[str]:
        return [line["message"] for line in self.said(rank) if "error" in line]

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def wait(self, until: Callable[[], bool]) -> float:
        """The seconds until it is so."""
        since = time.monotonic()
        while not until():
            assert time.monotonic() - since < LIMIT, self.log[-6000:]
            time.sleep(0.02)
        return time.monotonic() - since

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: any(line.get("step", 0) >= step for line in self.said(0)))

    def wait_for_end(self, hosts: int) -> None:
        self.wait(lambda: all(agent.poll() is not None for agent in self.agents[:hosts]))

    def runs(self, rank: int) -> bool:
        pid = next(line["pid"] for line in reversed(self.said(rank)) if "pid" in line)
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
        except OSError:
            return False

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())  # type: ignore[no-any-return]


def alone(folder: Path, kind: str, world: int, steps: int) -> dict[str, Any]:
    """What the same ranks come to without a network."""
    return launch(WORKER, world, str(folder), kind, str(steps))  # type: ignore[no-any-return]


# What is interrupted, ranks a host, gigabits a second, frames that are lost.
@pytest.mark.parametrize(
    ("kind", "nproc", "gbps", "loss"),
    [("step", 1, 0.1, 0.002), ("save", 2, 1, 0.0), pytest.param("exchange", 2, 10, 0.0, marks=pytest.mark.exhaustive)],
)
def test_a_cable_that_is_put_back_is_waited_for_and_the_wire_carries_what_the_program_says(
    tmp_path: Path, kind: str, nproc: int, gbps: float, loss: float
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    with hosts(2, gbps=gbps, delay=0.02, loss=loss) as among:
        job = Job(tmp_path / "there", among, nproc, kind, 12, None)
        job.wait_for_step(STARTED)
        if kind == "save":  # one is being written
            job.wait(lambda: any((tmp_path / "there" / "saved").glob(".step-*")))
        among[1].pull()
        time.sleep(2.0)
        among[1].plug()
        job.wait_for_end(2)
        said = [line for rank in range(2 * nproc) for line in job.said(rank)]
        assert {line["host"] for line in said if "host" in line} == {"host0", "host1"}
        assert not [line for line in said if "error" in line]
    found, expected = job.result, alone(tmp_path / "here", kind, 2 * nproc, 12)
    assert found["weights"] == expected["weights"]
    if kind == "step":
        # Ranks are in a ring that crosses from host to host once in each direction: each card sends as much as a rank.
        assert found["said"] <= found["sent"] <= 1.05 * found["said"]


def test_what_neighbours_gather_stays_in_their_host(tmp_path: Path) -> None:
    """Two hosts of two ranks: backward's gathers cross no cable, and the numbers are the same."""
    found: dict[str, dict[str, Any]] = {}
    with hosts(2, gbps=1, delay=0.001) as among:
        for kind in ("units", "neighbours"):
            (tmp_path / kind).mkdir()
            job = Job(tmp_path / kind, among, 2, kind, 8, None)
            job.wait_for_end(2)
            found[kind] = job.result
    every, fewer = found["units"], found["neighbours"]
    assert fewer["weights"] == every["weights"]
    # Four gathers, four reductions, which over gloo count twice, and two of the gathers again: the last layer's stays,
    # and backward does not read the first one.
    assert fewer["said"] / every["said"] == pytest.approx(12 / 14, rel=0.01)
    for one in found.values():
        assert one["said"] <= one["sent"] <= 1.05 * one["said"], found


# What a pulled cable interrupts -> what each host's ranks say. The second one is cut off from the store.
@pytest.mark.parametrize(
    ("kind", "gbps"),
    [
        pytest.param("step", 1, marks=pytest.mark.exhaustive),
        ("save", 10),
        pytest.param("exchange", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_cable_that_stays_pulled_is_an_error_on_both_sides_of_it(tmp_path: Path, kind: str, gbps: float) -> None:
    with hosts(2, gbps=gbps, delay=0.005) as among:
        job = Job(tmp_path, among, 2, kind, 1000, None)
        job.wait_for_step(STARTED)
        among[1].pull()
        assert job.wait(lambda: not any(job.runs(rank) for rank in range(4))) < 40
        here, there = job.errors(0) + job.errors(1), job.errors(2) + job.errors(3)
        assert here and all("(process " in one and " on host1)" in one and "checkpoint" in one for one in here), here
        lost = "The store at which ranks meet does not answer"
        assert all(lost in one and "checkpoint" in one for one in there)
        assert there or f"RankError: {lost}" in job.log


def test_where_a_host_dies_the_others_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    with hosts(2, gbps=0.1, delay=0.005) as among:
        job = Job(there, among, 1, "save", 12, fewest=1)
        job.wait_for_step(STARTED)
        among[1].die()
        job.wait_for_end(1)
        (error,) = job.errors(0)
        assert "on host1)" in error or "died or hangs" in error, error
    begun, again = (line["network"] for line in job.said(0) if "network" in line)
    assert 0.05 <= begun[0] <= 0.1 and 10 <= begun[1] <= 30 and again is None  # one rank alone has no network
    first = [line["first"] for line in job.said(0) if "first" in line][-1]
    assert STARTED - 1 <= first < 12
    shutil.copytree(there / "saved" / f"step-{first}", here / "saved" / f"step-{first}")
    assert job.result["weights"] == alone(here, "save", 1, 12)["weights"]
    assert alone(tmp_path, "step", 1, 12)["weights"] != job.result["weights"], "the control: no step on two ranks"


def test_hosts_leave_nothing_behind() -> None:
    with hosts(2, gbps=1, delay=0.01) as among:
        names = [host.namespace for host in among]
        said = among[1].popen(["ping", "-c", "1", among[0].address]) if shutil.which("ping") else None
        assert said is None or said.wait() == 0
        assert all(Path("/run/netns", name).exists() for name in names)
    assert not any(Path("/run/netns", name).exists() for name in names)


def test_sites_wait_for_a_cable_that_is_put_back_and_one_goes_on_without_the_other(tmp_path: Path) -> None:
    with hosts(2, gbps=1, delay=0.02) as among:
        command = [sys.executable, "-P", "-m", "fsdp_compiled", "rendezvous", "--port", "29400"]
        hub = among[0].popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        assert "sites meet at port 29400" in hub.stdout.readline()
        place = f"{among[0].address}:29400"
        one, two = (Site(place, seed, 1, tmp_path / f"{seed}.log", popen=host.popen) for seed, host in enumerate(among))
        try:
            assert "error" not in one.do("steps", EVERY)  # it is the first
            two.begin("steps", EVERY)
            since = time.monotonic()
            while "to the new" not in one.log.read_text() + two.log.read_text():
                assert "error" not in one.do("steps", 1) and time.monotonic() - since < LIMIT
            one.begin("steps", EVERY)
            among[1].pull()
            time.sleep(1.0)
            among[1].plug()
            found = [site.end()["weights"] for site in (one, two)]
            assert found[0] == found[1]
            among[1].pull()
            found = all_do([one, two], "steps", EVERY)
            assert "weights" in found[0] and "does not answer" in found[1]["error"]
            assert "gave no sign of life" in one.log.read_text()
        finally:
            for process in (*one.ranks, *two.ranks, hub):
                end(process)
