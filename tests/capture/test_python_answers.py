"""What a trace asks of Python past all guards gets another answer later: what eager PyTorch computes, or refused."""

from __future__ import annotations

import abc
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_compiled import CaptureError, Policy, compile_sharded, fully_shard
from fsdp_compiled.capture import dynamo
from fsdp_compiled.capture.blocks.repeated_calls import Repeats
from fsdp_compiled.capture.python_answers import Asked

LOG = logging.getLogger("tests.python_answers")
TABLE = {"factor": 1.0}
NUMBER, COUNT = np.float64(2.0), np.int64(2)


class Part:
    pass


class Kind(abc.ABC):  # noqa: B024, nothing is abstract in it
    pass


@functools.lru_cache
def looked_up_by(kind: str) -> float:
    return TABLE["factor"] if kind == "first" else 1.0


@functools.lru_cache
def looked_up() -> float:
    return TABLE["factor"]


@functools.lru_cache
def ramp(width: int) -> torch.Tensor:
    return torch.arange(float(width)) * TABLE["factor"]


@functools.lru_cache
def drawn(width: int) -> torch.Tensor:
    return torch.rand(width)


@functools.lru_cache
def summed(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


A, B, MASK, OTHER = Part(), Part(), torch.ones(4), torch.ones(4)


class Net(nn.Module):
    """Equal blocks in front, which are not walked through, and what is asked."""

    def __init__(self, ask: Callable[[Net], Any], blocks: int = 0) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(4, 4), ask
        self.first, self.second = Part(), Part()
        self.blocks = nn.ModuleList(Asking() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.linear(x) * self.ask(self)).square().mean()


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first, self.second = Part(), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (3.0 if self.first is self.second else 1.0)


class Pair(nn.Module):
    """Of which no guard tells that its weights are two."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) * (3.0 if self.up.weight is self.down.weight else 1.0)


def one(net: nn.Module) -> None:
    net.second = net.first  # type: ignore[assignment]


def cleared(cached: Any) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        TABLE.update(factor=2.0)
        cached.cache_clear()

    return change


def registered(net: Net) -> None:
    Kind.register(Part)


Change = Callable[["Net"], None]
WAYS: dict[str, tuple[Callable[[Net], Any], Callable[[Net], None]]] = {
    "is": (lambda net: 2.0 if net.first is net.second else 1.0, one),
    "is not": (lambda net: 2.0 if net.first is not net.second else 1.0, one),
    "globals": (lambda net: 2.0 if A is B else 1.0, lambda net: globals().update(B=A)),
    "equal": (lambda net: 2.0 if net.first == net.second else 1.0, one),
    "in": (lambda net: 2.0 if net.first in [net.second] else 1.0, one),
    "tensors": (lambda net: 2.0 if MASK is OTHER else 1.0, lambda net: globals().update(OTHER=MASK)),
    "a cached number": (lambda net: looked_up(), lambda net: TABLE.update(factor=2.0)),
    "a cached number, cleared": (lambda net: looked_up(), cleared(looked_up)),
    "a cached table": (lambda net: ramp(4), lambda net: TABLE.update(factor=2.0)),
    "a cached table, cleared": (lambda net: ramp(4), cleared(ramp)),
    "a logger": (lambda net: 2.0 if LOG.isEnabledFor(logging.DEBUG) else 1.0, lambda net: LOG.setLevel(logging.DEBUG)),
    "a logger, asked twice": (
        lambda net: 2.0 if LOG.isEnabledFor(logging.DEBUG) and LOG.isEnabledFor(logging.ERROR) else 1.0
        if LOG.isEnabledFor(logging.ERROR) else 0.0,
        lambda net: LOG.setLevel(logging.DEBUG),
    ),
    "a cached number by two names": (
        lambda net: looked_up_by(kind="first") + looked_up_by(kind="other"),
        lambda net: (TABLE.update(factor=2.0), looked_up_by.cache_clear()),
    ),
    "a level": (lambda net: float(LOG.getEffectiveLevel()), lambda net: LOG.setLevel(logging.DEBUG)),
    "isinstance": (lambda net: 2.0 if isinstance(net.first, Kind) else 1.0, registered),
    "issubclass": (lambda net: 2.0 if issubclass(Part, Kind) else 1.0, registered),
    "the interpreter": (lambda net: sys.getrecursionlimit() / 1000, lambda net: sys.setrecursionlimit(4321)),
}  # fmt: skip


def forget() -> None:
    global Part, Kind  # what was registered with a class stays
    Part = type("Part", (), {})  # type: ignore[misc]
    Kind = abc.ABCMeta("Kind", (), {})  # type: ignore[misc, assignment]
    TABLE.update(factor=1.0)
    looked_up.cache_clear()
    looked_up_by.cache_clear()
    ramp.cache_clear()
    LOG.setLevel(logging.WARNING)
    sys.setrecursionlimit(1000)
    globals().update(A=Part(), B=Part(), MASK=torch.ones(4), OTHER=torch.ones(4))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    yield
    forget()
    sys.setrecursionlimit(limit)


def losses(way: str, face: str, blocks: int = 0, change: Change | None = None) -> tuple[list[float], int]:
    """Of four steps, between the second and the third of which the answer changes; and how many captures."""
    forget()
    torch.manual_seed(0)
    ask, other = WAYS[way]

    net = Net(ask, blocks)
    x, found = torch.randn(2, 4), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if face == "compile_sharded":
        sharded = compile_sharded(net, optimizer, policy=Policy(lower="eager"))
    elif face == "fully_shard":
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        if step == 2:
            (change or other)(net)
        if face == "compile_sharded":
            found.append(sharded.step(x).item())
            continue
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, sharded.captures if face == "compile_sharded" else 0


@pytest.mark.parametrize("face", ["compile_sharded", "fully_shard"])
@pytest.mark.parametrize("way", WAYS)
def test_another_answer_is_seen(way: str, face: str) -> None:
    expected, _ = losses(way, "eager")
    found, captures = losses(way, face)
    assert found == pytest.approx(expected, rel=1e-6)
    stays = way in ("a cached number", "a cached table")  # what is kept does not follow
    assert face == "fully_shard" or captures == (1 if stays else 2)


@pytest.mark.parametrize("way", ["is", "tensors", "a cached table, cleared", "a logger", "isinstance"])
def test_control_where_nothing_is_asked_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asked, "changed", lambda *_: None)
    expected, _ = losses(way, "eager")
    found, _ = losses(way, "compile_sharded")
    assert found[:2] == pytest.approx(expected[:2], rel=1e-6) and found[2] != pytest.approx(expected[2], rel=1e-3)


def test_a_comparison_elsewhere_leaves_equal_blocks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that compares objects is the control: all of its list are walked through."""
    made = []
    monkeypatch.setattr(dynamo, "Repeats", lambda *given: made.append(Repeats(*given)) or made[-1])
    x = torch.randn(2, 4)
    for kind in (lambda: nn.Linear(4, 4), Pair):
        net = Net(WAYS["is"][0])
        net.blocks = nn.ModuleList(kind() for _ in range(6))
        compile_sharded(net, torch.optim.SGD(net.parameters(), 0.1), policy=Policy(lower="eager")).step(x)
    assert [one.wrote for one in made] == [True, False]


def test_two_objects_of_an_equal_block_that_become_one() -> None:
    def change(net: Net) -> None:
        one(net.blocks[4])

    expected, _ = losses("is", "eager", 6, change)
    found, captures = losses("is", "compile_sharded", 6, change)
    assert found == pytest.approx(expected, rel=1e-6) and captures == 2


REFUSED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "random": (lambda net: drawn(4), "drawn is under functools.lru_cache, and draws random numbers"),
    "of a tensor": (lambda net: summed(net.linear.weight), "summed is under functools.lru_cache, and is called with"),
    "floating": (lambda net: 2.0 if isinstance(NUMBER, np.floating) else 1.0, "asks a number of NumPy's"),
    "integer": (lambda net: 2.0 if isinstance(COUNT, int | np.integer) else 1.0, "asks a number of NumPy's"),
}  # fmt: skip


@pytest.mark.parametrize("face", ["compile_sharded", "fully_shard"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_program_cannot_know_is_refused(what: str, face: str) -> None:
    ask, why = REFUSED[what]
    drawn.cache_clear()
    net, x = Net(ask), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=why):
        if face == "compile_sharded":
            compile_sharded(net, torch.optim.SGD(net.parameters(), 0.1), policy=Policy(lower="eager")).step(x)
        else:
            fully_shard(net)
            net(x)


def test_a_random_table_that_was_kept_before_is_used() -> None:
    drawn.cache_clear()
    table, net, x = drawn(4), Net(lambda net: drawn(4)), torch.randn(2, 4)
    expected = (net.linear(x) * table).square().mean().item()
    sharded = compile_sharded(net, torch.optim.SGD(net.parameters(), 0.0), policy=Policy(lower="eager"))
    assert [sharded.step(x).item() for _ in range(3)] == pytest.approx([expected] * 3, rel=1e-6)


def test_a_number_of_numpys_is_computed_with() -> None:
    net, x = Net(lambda net: NUMBER * net.linear.bias), torch.randn(2, 4)
    expected = (net.linear(x) * (NUMBER * net.linear.bias)).square().mean().item()
    sharded = compile_sharded(net, torch.optim.SGD(net.parameters(), 0.0), policy=Policy(lower="eager"))
    assert sharded.step(x).item() == pytest.approx(expected, rel=1e-6)
