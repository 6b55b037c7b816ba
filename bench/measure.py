"""One rank's part: all rivals in this process, checked against each other first, then timed in turns.

A *turn* is a few steps of one rival, begun by all ranks together. A *round* has a turn of every rival, each round
begins with another one, and so what the machine does besides meets them all alike. What is compared is always of one
round: a ratio is that of two turns that ran seconds apart.
"""

import gc
import math
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from bench.hosts import sent
from bench.network import Inner, Network, Transfer, slow_network
from bench.observe import Observer, Seen
from bench.options import BenchOptions
from bench.presets import Preset, on_device, rows_of_rank
from bench.rivals import BOUND, REFERENCE, RIVALS, Rival, Setting, Step
from bench.screen import Screen
from fsdp_compiled.cli.rank import RankInfo, Ranks, Stop

BATCHES = 2  # that are trained on by turns, so that the first and the last checked step see the same one
CHECKED = 5  # steps whose losses are compared, and which warm each rival up
MOVED = 100 * BOUND  # what the losses change by at least, or their agreement would say nothing


class WrongLoss(ValueError):
    """A rival trains something else than this package's eager lowering does."""


def compare(name: str, losses: Sequence[float], reference: Sequence[float], bound: float | None = BOUND) -> float:
    """The largest relative difference over the steps; raises `WrongLoss` beyond ``bound``, or if it is no number."""
    if abs(reference[0] - reference[-1]) <= MOVED * abs(reference[0]):
        raise ValueError(
            f"The losses of the first {len(reference)} steps hardly move ({reference[0]:.6f} to {reference[-1]:.6f}), "
            "so that they are equal would say nothing; give a larger model or batch."
        )
    worst, most = 0.0, math.inf if bound is None else bound
    for step, (mine, other) in enumerate(zip(losses, reference, strict=True), 1):
        difference = abs(mine - other) / abs(other)
        if not difference <= most:
            raise WrongLoss(
                f"{name} has a wrong loss at step {step}: {mine:.8f}, where this package's eager lowering has "
                f"{other:.8f}, a relative difference of {difference:.1e}; at most {most:.0e} is rounding. Nothing is "
                f"reported. Leave {name} out (--rivals), or find out why it trains something else."
            )
        worst = max(worst, difference)
    return worst


Wire = tuple[float, float | None]  # seconds a step: on the wire, and of these, those that a rank waited for


def wire(transfers: Sequence[Transfer], steps: int) -> Wire:
    """What a turn's transfers took, and how much of it nothing hid; None where DDP's reducer does the waiting."""
    exposed = None if any(one.waited is None for one in transfers) else sum(one.exposed for one in transfers) / steps
    return sum(one.end - one.start for one in transfers) / steps, exposed


class Contest:
    """Rivals side by side on this rank."""

    def __init__(
        self,
        preset: Preset,
        rivals: Sequence[Rival],
        here: RankInfo,
        ranks: Ranks,
        seed: int,
        screen: Screen,
        node: int = 1,
    ) -> None:
        self.preset, self.rivals, self.here, self.ranks, self.screen = preset, rivals, here, ranks, screen
        self.setting = Setting(preset, here, seed, node)
        self.whole = on_device(preset.batches(here.world, seed, BATCHES), here.device)
        self.mine = [rows_of_rank(batch, here.rank, preset.batch) for batch in self.whole]
        # Of all ranks of a node together.
        self.nodes = [rows_of_rank(batch, here.rank // node, preset.batch * node) for batch in self.whole]
        self.steps: dict[str, Step] = {}
        self.seen: dict[str, Seen] = {}
        self.losses: dict[str, list[float]] = {}
        self.distances: dict[str, float] = {}
        self.turns: dict[str, list[list[tuple[float, float]]]] = {}  # by round, by rank: CPU and wall seconds a step
        self.wires: dict[str, list[Wire]] = {}  # by round, on a simulated network: this rank's
        self.sent: dict[str, list[float]] = {}  # by round, between hosts: bytes a step, by this host's network card

    def check(self, stop: Stop | None = None) -> bool:
        """Builds every rival and takes its first steps, this package's eager lowering first; False if it was asked to
        stop before the last."""
        others = [rival for rival in self.rivals if rival.name != REFERENCE]
        self.screen.phase("building and checking", 1 + len(others))
        for rival in (RIVALS[REFERENCE], *others):
            self.screen.advance(rival.name)
            began = time.perf_counter()
            self._begin(rival)
            self.distances[rival.name] = compare(
                rival.name, self.losses[rival.name], self.losses[REFERENCE], rival.bound
            )
            self.screen.say(
                f"  {rival.name}: built and {CHECKED} steps taken in {time.perf_counter() - began:.1f} s, "
                f"losses within {self.distances[rival.name]:.0e}"
            )
            if stop is not None and stop.agreed(self.ranks):
                return False
        if REFERENCE not in {rival.name for rival in self.rivals}:
            del self.steps[REFERENCE]
        return True

    def _begin(self, rival: Rival) -> None:
        observer, losses = Observer(self.here.device), []
        # One rank is observed, so the other's clock shows what an unobserved one takes.
        with observer.watching() if self.here.first else nullcontext():
            if self._works(rival):
                step = self.steps[rival.name] = rival.build(self.setting)
            for index in range(CHECKED):
                loss = torch.zeros((), device=self.here.device)
                if self._works(rival):
                    batch = self._batches(rival)[index % BATCHES]

                    def run(batch: Any = batch) -> torch.Tensor:
                        return step(*batch)

                    loss = observer.step(run) if self.here.first else run()
                losses.append(loss.item())
        among = 1 if rival.alone else self.here.world
        self.losses[rival.name] = [sum(each) / among for each in zip(*self.ranks.exchange(losses), strict=True)]
        if observer.seen is not None:
            self.seen[rival.name] = observer.seen

    def _works(self, rival: Rival) -> bool:
        return self.here.first or not rival.alone

    def _batches(self, rival: Rival) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self.whole if rival.alone else self.nodes if rival.tp else self.mine

    def race(
        self, rounds: int, steps: int, stop: Stop, network: Network | None = None, hosts: int | None = None
    ) -> bool:
        """All rounds; False if the run was asked to stop before the last."""
        gc.collect()
        gc.freeze()  # or each collection would walk the graphs and caches of all the other rivals
        self.screen.phase("round", rounds)
        for number in range(rounds):
            first = number % len(self.rivals)
            order = [*self.rivals[first:], *self.rivals[:first]]
            self.screen.advance(f"{steps} steps each, {order[0].name} first")
            for rival in order:
                before = sent()
                turn = self._turn(rival, steps)
                if hosts is not None:
                    self.sent.setdefault(rival.name, []).append((sent() - before) / steps)
                self.turns.setdefault(rival.name, []).append(turn)
                if network is not None:
                    self.wires.setdefault(rival.name, []).append(wire(network.take(), steps))
            if stop.agreed(self.ranks):
                return False
        return True

    def _turn(self, rival: Rival, steps: int) -> list[tuple[float, float]]:
        """What each rank took, in seconds a step: of processor, of all its threads, and of the clock on the wall."""
        dist.barrier()
        self._finish()
        wall, cpu = time.perf_counter(), time.process_time()
        if self._works(rival):
            step, batches = self.steps[rival.name], self._batches(rival)
            for index in range(steps):
                step(*batches[index % BATCHES])
            self._finish()
        mine = (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps
        return self.ranks.exchange(mine)

    def _finish(self) -> None:
        if self.here.device.type == "cuda":
            torch.cuda.synchronize(self.here.device)

    def result(self) -> dict[str, dict[str, Any]]:
        """By rival, everything measured, in seconds and bytes."""
        return {
            rival.name: {
                "title": rival.title,
                "losses": self.losses[rival.name],
                "distance": self.distances[rival.name],
                "cpu": [[cpu for cpu, _ in turn] for turn in self.turns[rival.name]],
                "wall": [[wall for _, wall in turn] for turn in self.turns[rival.name]],
                **self.seen[rival.name].facts(),
                **({"wire": self.wires[rival.name]} if rival.name in self.wires else {}),
                **({"sent": self.sent[rival.name]} if rival.name in self.sent else {}),
            }
            for rival in self.rivals
        }


@contextmanager
def quiet_threads(device: torch.device) -> Iterator[None]:
    """On a CPU, one thread a rank: ranks share the machine's cores."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_steps(
    options: BenchOptions, preset: Preset, rivals: Sequence[Rival], here: RankInfo, screen: Screen
) -> dict[str, Any] | None:
    """The whole contest; None if it was stopped."""
    if options.network_gbps is not None and here.device.type != "cpu":
        raise ValueError("--network-gbps simulates a network between CPUs; leave it out on GPUs.")
    stop = Stop()
    ranks = Ranks()
    with quiet_threads(here.device):
        contest = Contest(preset, rivals, here, ranks, options.seed, screen, options.node or 1)
        if not contest.check(stop):
            return None
        before = os.getloadavg()
        slow = (
            slow_network(options.network_gbps, options.latency_ms / 1e3, spared=ranks.group, inner=inner_of(options))
            if options.network_gbps is not None and options.hosts is None
            else nullcontext()
        )
        with slow as network:
            complete = contest.race(preset.rounds, preset.steps, stop, network, options.hosts)
        if not complete or not here.first:
            return None if not complete else {}
        return {
            "conditions": conditions(options, here, before),
            "reference": contest.losses[REFERENCE],
            "rivals": contest.result(),
        }


def inner_of(options: BenchOptions) -> Inner | None:
    return None if options.inner_gbps is None or options.node is None else Inner(options.inner_gbps, options.node)


def conditions(options: BenchOptions, here: RankInfo, load: Sequence[float]) -> Mapping[str, Any]:
    return {
        "world": here.world,
        "device": here.device.type,
        "backend": dist.get_backend(),
        "threads a rank": torch.get_num_threads(),
        "load average before and after": [round(load[0], 2), round(os.getloadavg()[0], 2)],
        "network": None
        if options.network_gbps is None
        else {
            "gigabits per second": options.network_gbps,
            "latency ms": options.latency_ms,
            **({} if options.hosts is None else {"hosts": options.hosts}),
            **({} if options.inner_gbps is None else {"inner": options.inner_gbps, "ranks of a node": options.node}),
        },
    }


def measure_first_step(preset: Preset, rival: Rival, here: RankInfo, seed: int) -> tuple[float, float]:
    """Seconds from before the model is built until the first step's loss is on the host, the slowest rank's, and of
    processors, of all ranks and the compilers that they called."""
    ranks = Ranks()
    with quiet_threads(here.device):
        setting = Setting(preset, here, seed)
        whole = on_device(preset.batches(here.world, seed, 1), here.device)[0]
        dist.barrier()
        began, spent = time.perf_counter(), _spent()
        if here.first or not rival.alone:
            rival.build(setting)(*(whole if rival.alone else rows_of_rank(whole, here.rank, preset.batch))).item()
        taken, spent = time.perf_counter() - began, _spent() - spent
        every = ranks.exchange((taken, spent))
        return max(taken for taken, _ in every), sum(spent for _, spent in every)


def _spent() -> float:
    """Seconds of processors, of this process and of those that it started and that ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
