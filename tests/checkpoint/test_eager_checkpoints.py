"""Checkpoints of optimizers that run as they are: what their code keeps, in whatever form, comes back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.cli import main
from tests.launch import launch
from tests.untraced import Average, Idle, Noted, Queue, Scaled, batches, eagerly, loss
from tests.workers import eager_checkpoints as worker

EAGER = Policy(lower="eager")


class Kinds(Queue):
    """Keeps a tensor of one number, one of booleans, containers in containers, an attribute, an option that moves."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.calls += 1
        for group in self.param_groups:
            group["warm"] = (group["step"], 1.0 / group["step"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "steps" not in state:
                    state["steps"], state["more"] = torch.tensor(0.0), {"up": [torch.zeros_like(p)], 2: None}
                state["steps"] += 1
                state["sign"] = p.grad > 0
                state["more"]["up"][0].add_(p.grad)
                p.sub_(state["more"]["up"][0] * state["sign"], alpha=0.01 / float(state["steps"]) / self.calls)


def shard(model: nn.Module, optimizer: optim.Optimizer) -> Sharded:
    return compile_sharded(model, optimizer, loss=loss, policy=EAGER)


@pytest.mark.parametrize(("model", "kind"), [(Idle, Queue), (Idle, Kinds), (Idle, Average)])
@pytest.mark.parametrize("before", [0, 2])
def test_a_loaded_run_goes_on_bit_for_bit(
    tmp_path: Path, model: type[nn.Module], kind: type[Queue], before: int
) -> None:
    """``before``: steps of eager PyTorch, whose state is brought along."""
    rows = list(batches(9))

    def begin() -> tuple[Sharded, Queue]:
        net = model()
        optimizer = kind(net.parameters())
        eagerly(net, optimizer, rows[:before])
        return shard(net, optimizer), optimizer

    one, first = begin()
    for batch in rows[before:5]:
        one.step(batch)
    one.save(tmp_path, wait=True)
    expected = [float(one.step(batch)) for batch in rows[5:]]
    net = model()
    second = kind(net.parameters())
    other = shard(net, second)
    assert other.load(tmp_path) == 5 - before
    assert [float(other.step(batch)) for batch in rows[5:]] == expected
    weights = one.full_state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in other.full_state_dict().items())
    assert [*getattr(second, "rates", [])] == [*getattr(first, "rates", [])]
    assert kind is Average or second.param_groups[0]["step"] == first.param_groups[0]["step"]
    assert one.load(tmp_path) and [float(one.step(batch)) for batch in rows[5:]] == expected, "where there was state"
    fresh = begin()[0]
    assert [float(fresh.step(batch)) for batch in rows[5:]] != expected, "the control"


class ByName(Queue):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["common"]["calls"] = 1


def test_what_no_checkpoint_holds_is_refused_by_name(tmp_path: Path) -> None:
    for kind, model, why in (
        (ByName, Idle, "it keeps state 'common', which belongs to no parameter"),
        (Noted, Scaled, "it keeps one tensor of .* under two names"),
    ):
        net = model()
        sharded = shard(net, kind(net.parameters()))
        sharded.step(next(batches(1)))
        with pytest.raises(ValueError, match=why):
            sharded.save(tmp_path)
        sharded.step(next(batches(1)))


def test_state_that_was_written_by_hand_is_saved(tmp_path: Path) -> None:
    net = Idle()
    one = shard(net, Queue(net.parameters()))
    for batch in batches(3):
        one.step(batch)
    name = next(name for name in one.state.optimizer if name.startswith("up.weight.queue"))
    one.state.optimizer[name].fill_(0.5)
    one.state.optimizer["up.weight.seen"].fill_(9)
    one.save(tmp_path, wait=True)
    net = Idle()
    other = shard(net, Queue(net.parameters()))
    other.load(tmp_path)
    assert bool((other.state.optimizer[name] == 0.5).all()) and other.state.optimizer["up.weight.seen"] == 9


def test_another_optimizer_is_refused_or_left_out(tmp_path: Path) -> None:
    net = Idle()
    one = shard(net, Queue(net.parameters()))
    one.step(next(batches(1)))
    one.save(tmp_path / "eager", wait=True)
    net = Idle()
    traced = shard(net, optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"the optimizer is torch.optim.sgd.SGD here, and tests.untraced.Queue in the"):
        traced.load(tmp_path / "eager")
    net = Idle()
    other = shard(net, Queue(net.parameters(), decay=0.7))
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['decay'\] is 0.7 here, and 0.1 in the checkpoint"):
        other.load(tmp_path / "eager")
    assert not other.state.optimizer
    other.load(tmp_path / "eager", strict=False)
    before = one.full_state_dict()
    assert all(torch.equal(value, before[name]) for name, value in other.full_state_dict().items())
    with pytest.raises(ValueError, match="Queue counts in its attribute"):
        one.full_optimizer_state_dict()


def test_its_weights_are_converted_and_its_state_is_said_to_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Idle()
    one = shard(net, Queue(net.parameters()))
    one.step(next(batches(1)))
    one.save(tmp_path / "ours", wait=True)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert "left out: owners" in capsys.readouterr().out
    net = Idle()
    other = shard(net, Queue(net.parameters()))
    other.import_weights(tmp_path / "hf")
    before = one.full_state_dict()
    assert all(torch.equal(value, before[name]) for name, value in other.full_state_dict().items())


def test_on_two_ranks_and_from_two_to_one(tmp_path: Path) -> None:
    """Under each placement, and on one process, the same by name and bit for bit."""
    ranks: Any = launch(Path(worker.__file__), 2, str(tmp_path))
    for rank in ranks:
        apart = rank.pop("apart")
        assert "ValueError: owners is not the same on all ranks" in apart
        assert not rank.pop("control") and all(rank.values()), rank
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    sharded, optimizer = worker.build()
    sharded.load(tmp_path)
    assert worker.equal(worker.whole(sharded, optimizer), expected)
    losses = worker.train(sharded, worker.BEFORE, worker.BEFORE + worker.AFTER)
    assert max(abs(a - b) for a, b in zip(losses, expected["losses"])) < 1e-6
