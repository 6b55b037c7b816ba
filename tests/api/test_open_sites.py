"""Sites that come and go, beside a loop that a person would write: whose mean it is, and what a new site gets."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import OuterSGD, Policy, Rendezvous, compile_sharded, passes
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.distributed.sites import Sites
from fsdp_compiled.ir.nodes import is_collective, is_wait, mutated
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.runtime.local_steps import halves
from tests.launch import free_port
from tests.open_sites import LONG, Site, all_do, end
from tests.workers.open_sites import EVERY, OUTER, PATIENCE, batches, inner, loss_of, model_of

ROOT = Path(__file__).parents[2]
BOUND = 1e-6


class Plain:
    """What a person would write: a model of a site, and what an exchange does to it."""

    def __init__(self, seed: int, ranks: int = 1) -> None:
        self.model = model_of(seed)
        self.optimizer = inner(self.model)
        self.given = [batches(seed, rank) for rank in range(ranks)]

    @property
    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            sum(loss_of(self.model, *next(one)) / len(self.given) for one in self.given).backward()  # type: ignore[union-attr]
            self.optimizer.step()

    def take(self, weights: torch.Tensor) -> None:
        nn.utils.vector_to_parameters(weights.clone(), self.model.parameters())


class Common:
    """The weights that sites have in common, and the outer optimizer."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = nn.Parameter(weights.clone())
        self.optimizer = torch.optim.SGD([self.weights], OUTER.lr, OUTER.momentum, nesterov=OUTER.nesterov)

    def exchange(self, old: Sequence[Plain], new: Sequence[Plain] = ()) -> None:
        changes = [self.weights.detach() - one.weights for one in old]
        self.weights.grad = torch.stack(changes).mean(0)
        self.optimizer.step()
        for one in (*old, *new):
            one.take(self.weights.detach())


def off(found: Any, plain: Plain) -> float:
    assert "error" not in found, found
    return float((torch.tensor(found["weights"]) - plain.weights).abs().max())


Start = Callable[..., Site]


class Hub:
    """The store where they meet. ``served``: by a process of its own, as a user's is; else by this one, which is sooner
    there."""

    def __init__(self, port: int, served: bool = False) -> None:
        self.endpoint, self.process = f"localhost:{port}", None
        if served:
            command = [sys.executable, "-P", "-m", "fsdp_compiled", "rendezvous", "--port", str(port)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert self.process.stdout is not None
            self.said = self.process.stdout.readline()
        self.store = dist.TCPStore("localhost", port, is_master=not served, wait_for_workers=False)

    def wait(self, key: str) -> None:
        """Until a site has written this."""
        end = time.monotonic() + LONG
        while not self.store.check([key]):
            assert time.monotonic() < end, key
            time.sleep(0.05)

    def end(self) -> None:
        if self.process is not None:
            end(self.process)


@pytest.fixture
def hub() -> Hub:
    return Hub(free_port())


@pytest.fixture
def served() -> Iterator[Hub]:
    found = Hub(free_port(), served=True)
    yield found
    found.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Site] = []

    def site(hub: Hub, seed: int, least: int = 1, ranks: int = 1) -> Site:
        made.append(Site(hub.endpoint, seed, least, tmp_path / f"{len(made)}.log", ranks))
        return made[-1]

    yield site
    for one in made:
        one.kill()


def begun(hub: Hub, a: Site, b: Site, mine: Plain, yours: Plain) -> Common:
    """Two sites begin and make their first exchange, as their plain twins do; what these have in common then."""
    a.begin("steps", EVERY)
    hub.wait("here/0.0/1")  # so it is the first, whose weights the others get
    b.begin("steps", EVERY)
    found = [a.end(), b.end()]
    common = Common(mine.weights)
    yours.take(mine.weights)
    for one in (mine, yours):
        one.steps(EVERY)
    common.exchange([mine, yours])
    assert max(off(found[0], mine), off(found[1], yours)) <= BOUND
    return common


def test_the_mean_is_of_those_that_are_left_and_a_new_site_gets_their_weights(hub: Hub, start: Start) -> None:
    a, b, c = (start(hub, seed, least=2) for seed in range(3))
    mine, yours, theirs = (Plain(seed) for seed in range(3))
    common = begun(hub, a, b, mine, yours)

    c.begin("steps", EVERY)  # it waits for the next exchange, and then makes its steps
    hub.wait("here/2.0/3")
    found = all_do([a, b], "steps", EVERY)
    for one in (mine, yours):
        one.steps(EVERY)
    common.exchange([mine, yours], [theirs])
    assert max(off(found[0], mine), off(found[1], yours)) <= BOUND

    b.kill()
    found = [a.do("steps", EVERY), c.end()]
    lonely = Plain(0)
    for one in (mine, theirs):
        one.steps(EVERY)
    lonely.take(mine.weights)
    common.exchange([mine, theirs])
    assert max(off(found[0], mine), off(found[1], theirs)) <= BOUND < 1e-3 < off(found[0], lonely)
    assert "gave no sign of life" in a.log.read_text() + c.log.read_text()

    again, yours = start(hub, 1, least=2), Plain(1)
    again.begin("steps", EVERY)
    hub.wait("here/4.0/4")
    found = all_do([a, c], "steps", EVERY)
    for one in (mine, theirs):
        one.steps(EVERY)
    common.exchange([mine, theirs], [yours])

    c.do("die")
    c.begin("steps", EVERY)
    found = [a.do("steps", EVERY), again.end()]
    for one in (mine, yours, theirs):
        one.steps(EVERY)
    with_all = (common.weights.detach() - theirs.weights).abs().max()
    common.exchange([mine, yours])
    assert max(off(found[0], mine), off(found[1], yours)) <= BOUND < 1e-3 < float(with_all)
    assert "it failed, and is made again" in a.log.read_text() + again.log.read_text()


def test_a_site_that_stood_still_joins_again_and_one_that_cannot_send_ends_all(hub: Hub, start: Start) -> None:
    a, b = start(hub, 0), start(hub, 1)
    mine, yours = Plain(0), Plain(1)
    a.do("steps", 1)
    b.begin("steps", 1)
    hub.wait("here/1.0/2")
    a.do("steps", 1)
    b.end()
    common = Common(mine.weights)
    mine.steps(2)
    common.exchange([mine], [yours])
    b.signal(signal.SIGSTOP)
    found = a.do("steps", EVERY)  # alone, after its patience
    mine.steps(EVERY)
    common.exchange([mine])
    assert off(found, mine) <= BOUND
    b.signal(signal.SIGCONT)
    b.begin("steps", 1)
    hub.wait("here/3.0/2")
    found = [a.do("steps", EVERY), b.end()]
    mine.steps(EVERY)
    common.exchange([mine], [yours])
    assert max(off(found[0], mine), off(found[1], yours)) <= BOUND
    assert "it was thought gone in exchange 2" in b.log.read_text()

    b.do("fail")
    errors = [one["error"] for one in all_do([a, b], "steps", EVERY)]
    assert all("it failed 3 times, with no site lost" in one for one in errors)
    assert "this cannot be sent" in errors[1]


def test_sites_of_two_ranks_and_one_of_which_a_rank_is_killed(hub: Hub, start: Start) -> None:
    a, b = start(hub, 0, least=2, ranks=2), start(hub, 1, least=1, ranks=2)
    mine, yours = Plain(0, 2), Plain(1, 2)
    common = begun(hub, a, b, mine, yours)
    a.ranks[1].kill()
    assert "RankError: Rank 1" in a.do("steps", EVERY)["error"]
    a.kill()
    found = [b.do("steps", EVERY)]
    yours.steps(EVERY)
    common.exchange([yours])
    assert off(found[0], yours) <= BOUND


def test_a_resumed_site_goes_on_and_gives_its_weights(tmp_path: Path, start: Start, served: Hub) -> None:
    a = start(served, 0)
    mine, yours = Plain(0), Plain(1)
    a.do("steps", EVERY + 1)
    assert "error" not in a.do("save", str(tmp_path / "saved"))
    a.kill()
    served.end()
    again = Hub(int(served.endpoint.rpartition(":")[2]), served=True)
    try:
        fresh, resumed = start(again, 1, least=2), start(again, 0, least=2)
        common = Common(mine.weights)
        mine.steps(EVERY)
        common.exchange([mine])
        mine.steps(1)
        fresh.begin("steps", 1)
        again.wait("here/0.0/1")  # it comes first, and has made no exchange
        resumed.begin("load", str(tmp_path / "saved"))
        assert "error" not in resumed.end()
        resumed.begin("steps", 1)
        fresh.end()
        yours.take(common.weights.detach())
        yours.steps(1)
        fresh.begin("steps", 1)
        found = [resumed.end(), fresh.end()]
        mine.given = [batches(0, 0)]  # a process begins with the first
        mine.steps(1)
        yours.steps(1)
        common.exchange([mine, yours])
        assert max(off(found[0], mine), off(found[1], yours)) <= BOUND
    finally:
        again.end()


def test_a_store_that_is_gone_and_another_training_are_errors_by_name(served: Hub, start: Start) -> None:
    a = start(served, 0)
    assert "error" not in a.do("steps", 1)
    served.store.set("model", "another")
    b = start(served, 1)
    assert "train something else" in b.do("steps", 1)["error"]
    assert served.process is not None
    served.process.send_signal(signal.SIGSTOP)  # as where its machine lost its power
    assert "does not answer (no answer in 4 s)" in a.do("steps", 1)["error"]
    served.end()
    error = a.do("steps", 1)["error"]
    assert "does not answer" in error and served.endpoint in error and "rendezvous" in error
    assert "train something else" not in error
    assert "sites meet at port" in served.said


def test_new_sites_do_not_begin_where_others_had_come_further() -> None:
    """Whoever had may be silent for a while, and would then take the weights of these."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def site(made: int = 0) -> tuple[Sites, torch.Tensor, Callable[[], None]]:
        found = Sites(f"localhost:{store.port}", 1, 2.0, Mesh(torch.device("cpu")), "model")
        found.made, weights = made, torch.full((3,), float(made))

        def exchange() -> None:
            found.exchange(lambda _: None, lambda _: None, lambda: [weights], lambda got: weights.set_(got[0]))

        return found, weights, exchange

    first, _, exchange = site()
    for _ in range(3):
        exchange()
    assert first.made == 2  # the first time it began
    del first, exchange  # it is gone
    fresh, got, begin = site()
    resumed, _, go_on = site(made=2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(begin)
        time.sleep(1.0)
        assert not waiting.done() and fresh.new
        pool.submit(go_on).result(LONG)
        waiting.result(LONG)
    assert got.tolist() == [2.0] * 3 and fresh.made == resumed.made == 2


def test_what_is_sent_changes_nothing() -> None:
    """The program is cut between what is sent and what moves the weights."""
    leaves = [Leaf((f"layers.{n}",), (36,), (1,), torch.float32, True, 0, f"layers.{n}") for n in range(2)]
    for wire in (None, "int8"):
        policy = Policy("zero3", sync_every=8, bucket_mb=0, wire=wire, rendezvous=Rendezvous("hub:1"))  # type: ignore[arg-type]
        plan = make_plan(leaves, policy, torch.device("cpu"), 1, 3, 1)
        ((_, buffers),) = plan.exchanged
        sent, moved = halves(passes.outer(plan, buffers, first=True))
        assert any(is_collective(node) for node in sent.graph.nodes)
        assert not any(mutated(node) for node in sent.graph.nodes)
        assert not any(is_collective(node) for node in moved.graph.nodes) or wire
        assert sum(bool(mutated(node)) for node in moved.graph.nodes) == 3 * len(buffers)
        assert wire or not any(is_wait(node) for node in sent.graph.nodes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rendezvous": Rendezvous("hub:1")}, "sync_every steps, which is None"),
        ({"sync_every": 2, "rendezvous": "hub:1"}, "expected a Rendezvous"),
        ({"sync_every": 4, "rendezvous": Rendezvous("hub:1"), "outer": OuterSGD(parts=2)}, "Leave parts and overlap"),
        ({"sync_every": 4, "rendezvous": Rendezvous("hub:1"), "outer": OuterSGD(overlap=1)}, "Leave parts and overlap"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**fields)


@pytest.mark.parametrize("given", [("hub",), ("hub:",), (1,), ("hub:1", 0), ("hub:1", True), ("hub:1", 1, 0.0)])
def test_a_rendezvous_says_what_it_expects(given: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"Rendezvous\.(endpoint|least|patience) is .*; expected"):
        Rendezvous(*given)


def test_one_site_needs_no_other() -> None:
    """Alone, an exchange is that of one process; `Sharded.synchronize` makes the last one."""
    found = []
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for place in (None, Rendezvous(f"localhost:{store.port}", 1, PATIENCE)):
        model = model_of(0)
        sharded = compile_sharded(
            model, inner(model), loss=loss_of, policy=Policy(lower="eager", sync_every=2, outer=OUTER, rendezvous=place)
        )
        given = batches(0, 0)
        losses = [float(sharded.step(*next(given))) for _ in range(5)]
        sharded.synchronize()
        found.append((losses, [one.tolist() for one in sharded.state.parameters.values()]))
    assert found[0] == found[1]
