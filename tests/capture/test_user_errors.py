"""What the user's code raises while it is traced: a call ends in it, as in eager PyTorch, or in a refusal by name."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compiled import CaptureError, Policy, compile_sharded, fully_shard
from fsdp_compiled.capture.source_lines import words
from tests.chosen import chosen, needs_torch

LEFT: list[torch.Tensor] = []


class Stop(Exception):
    def __init__(self, at: int, what: Any = None) -> None:
        super().__init__(f"stopped at {at}")
        self.at, self.what = at, what


def stop(net: Net, _: torch.Tensor) -> None:
    raise Stop(net.calls)


def over_lines(net: Net, x: torch.Tensor) -> None:
    raise ValueError(
        f"call {net.calls} has "
        f"{tuple(x.shape)}"
    )  # fmt: skip


def bare(net: Net, _: torch.Tensor) -> None:
    raise NotImplementedError


def of_a_size(_: Net, x: torch.Tensor) -> None:
    assert x.shape[0] == 99, f"{x.shape[0]} rows"


def from_another(net: Net, _: torch.Tensor) -> None:
    try:
        {}["absent"]  # type: ignore[index]
    except KeyError as error:
        raise Stop(net.calls) from error


def while_another(net: Net, _: torch.Tensor) -> None:
    try:
        raise Stop(net.calls)
    finally:
        net.calls += 10


def again(net: Net, x: torch.Tensor) -> None:
    try:
        stop(net, x)
    except Stop as error:
        error.at += 100
        raise


def absent_key(net: Net, _: torch.Tensor) -> None:
    net.table["absent"]


def past_the_end(net: Net, x: torch.Tensor) -> None:
    if [1, 2][net.calls + 7]:
        x = x * 2


def by_zero(net: Net, x: torch.Tensor) -> None:
    x * (1 / (net.calls - net.calls))


def absent_attribute(net: Net, x: torch.Tensor) -> None:
    x * net.absent


def too_many(net: Net, x: torch.Tensor) -> None:
    one, _ = net.calls, net.calls, net.calls  # type: ignore[misc]
    x * one


def no_number(_: Net, x: torch.Tensor) -> None:
    x * int("a")


def emptied(_: Net, x: torch.Tensor) -> None:
    x * next(iter([]))


def leaves(net: Net, x: torch.Tensor) -> None:
    LEFT.append(x + 1)
    raise Stop(net.calls)


def leaves_a_weight(net: Net, _: torch.Tensor) -> None:
    LEFT.append(net.layer.weight)
    raise Stop(net.calls)


def holds(net: Net, x: torch.Tensor) -> None:
    raise Stop(net.calls, x * 2)


def writes(net: Net, _: torch.Tensor) -> None:
    net.seen.add_(1)
    raise Stop(net.calls)


def replaces(net: Net, _: torch.Tensor) -> None:
    net.seen = net.seen + 1
    raise Stop(net.calls)


def writes_its_input(net: Net, x: torch.Tensor) -> None:
    x.mul_(2)
    raise Stop(net.calls)


def draws(net: Net, x: torch.Tensor) -> None:
    torch.rand_like(x)
    raise Stop(net.calls)


def on_data(net: Net, x: torch.Tensor) -> None:
    if x.sum() < 1e9:
        raise Stop(net.calls)


class Net(nn.Module):
    seen: torch.Tensor

    def __init__(self, raises: Callable[[Net, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.raises, self.fails, self.calls = nn.Linear(4, 4), raises, False, 0
        self.table: dict[str, float] = {}
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.fails:
            self.calls += 1
            self.raises(self, x)
        return y.square().mean()


FACES = ("fully_shard", "compile_sharded")
Step = Callable[[], float]


def loop(net: Net, face: str) -> Step:
    """A step of the net, which raises what the net does."""
    x, optimizer = torch.ones(3, 4), torch.optim.SGD(net.parameters(), lr=0.1)
    if face == "compile_sharded":
        sharded = compile_sharded(net, optimizer, policy=Policy(lower="eager"))
        return lambda: float(sharded.step(x))
    if face == "fully_shard":
        fully_shard(net, policy=Policy(lower="eager"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        loss = net(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ends(net: Net, face: str) -> list[Any]:
    """The losses of four steps, and what is raised in the place of one: its type, words, notes and causes."""
    step, found = loop(net, face), list[Any]()
    for number in range(4):
        net.fails = number in (1, 2)
        try:
            found.append(step())
        except Exception as error:
            others = [type(other).__name__ for other in (error.__cause__, error.__context__)]
            last = traceback.extract_tb(error.__traceback__)[-1].name
            said = str(error).replace("FSDPNet", "Net")  # as FSDP2 names the class
            found += [type(error), said, getattr(error, "at", None), last, others, net.calls]
    return found


def in_turns(*raises: Any) -> list[Any]:
    """Each under each face; in `make test` under one of them in turn."""
    every = [(one, face) for one in raises for face in FACES]
    return chosen(every, [(one, FACES[at % len(FACES)]) for at, one in enumerate(raises)])


@pytest.mark.parametrize(
    ("raises", "face"),
    in_turns(
        stop, over_lines, bare, of_a_size, from_another, while_another, again, absent_key, past_the_end, by_zero,
        absent_attribute, too_many, no_number, emptied,
    ),
)  # fmt: skip
def test_a_step_ends_in_what_the_code_raises_and_the_next_ones_train(raises: Any, face: str) -> None:
    if raises is too_many:
        needs_torch((2, 13), "its Dynamo refuses, by name, to unpack too many values")
    assert ends(Net(raises), face) == ends(Net(raises), "eager")


@pytest.mark.parametrize(
    ("raises", "face"),
    in_turns(leaves, leaves_a_weight, holds, writes, replaces, writes_its_input, draws, on_data),
)
def test_what_eager_pytorch_would_have_left_of_tensors_is_refused(raises: Any, face: str) -> None:
    net = Net(raises)
    step = loop(net, face)
    step()
    net.fails = True
    with pytest.raises(CaptureError, match="cannot be traced whole"):
        step()
    LEFT.clear()


@pytest.mark.parametrize("face", FACES)
def test_an_error_of_the_users_mistake_is_explained(face: str) -> None:
    net = Net(lambda net, x: x @ torch.ones(7, 7))
    net.fails, step = True, loop(net, face)
    with pytest.raises(CaptureError, match="must have same reduction dim"):
        step()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("L['objective']._modules['model'].cache['h']", "model.cache['h']"),
        ("L['objective']._modules['model']._modules['objective']._modules['model'].p", "model.objective.model.p"),
        ("L['objective'].loss.count", "loss.count"),
        ("G['TABLE']['a']", "TABLE['a']"),
        ("G['__import_a_dot_b'].X", "a.b.X"),
    ],
)
def test_names_are_said_as_the_user_would_write_them(name: str, said: str) -> None:
    assert words(name, {}) == said
