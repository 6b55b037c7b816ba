"""Optimizers that cannot be traced but are element-wise run as they are, on pieces of the shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim.eager import PointwiseOnly
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.optim.twin import Refused
from tests.launch import launch
from tests.untraced import Idle, Noted, Queue, Scaled, batches, eagerly, groups, loss

EAGER = Policy(lower="eager", shard="zero1")


class Rebinds(Queue):
    """Puts new memory where a parameter's was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - float(group["lr"]) * p.grad


class LateNorm(Queue):
    """Mixes elements, but at a step that no trial comes to."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if group["step"] == 17 and p.grad is not None:
                    p.sub_(p.grad / p.grad.norm())


class ByDim(Queue):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=float(group["lr"]) * p.dim())


def _rate(step: int) -> float:
    return (0.0, 1.0, 0.4, 2.0, 0.5)[step % 5]


def _equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [Queue, Rebinds])
@pytest.mark.parametrize("before", [0, 2])
def test_as_in_eager_pytorch(kind: type[Queue], before: int, caplog: pytest.LogCaptureFixture) -> None:
    """With groups, a schedule, clipping, a parameter without a gradient, and steps that were made ``before``."""
    sides = []
    for ours in (False, True):
        model = Idle()
        optimizer = kind(groups(model))
        eagerly(model, optimizer, batches(before))
        schedule = optim.lr_scheduler.LambdaLR(optimizer, _rate)
        if ours:
            policy = Policy(lower="eager", clip=0.05)
            sharded = compile_sharded(model, optimizer, loss=loss, policy=policy)
        for batch in batches(6):
            if ours:
                sharded.step(batch)
            else:
                eagerly(model, optimizer, [batch], clip=0.05)
            schedule.step()
        sides.append((sharded.full_state_dict() if ours else model.state_dict(), optimizer))
    (theirs, eager), (mine, optimizer) = sides
    _equal(mine, theirs)
    assert [group["step"] for group in optimizer.param_groups] == [group["step"] for group in eager.param_groups]
    assert sharded.captures == 1
    said = [record.message for record in caplog.records if "runs as it is" in record.message]
    assert len(said) == 1 and said[0].startswith(f"{kind.__name__} runs as it is, on the shards")


def test_notes_on_parameters_and_state_under_two_names() -> None:
    eager, model = Scaled(), Scaled()
    theirs, mine = Noted(eager.parameters()), Noted(model.parameters())
    eagerly(model, mine, batches(2))
    sharded = compile_sharded(model, mine, loss=loss, policy=EAGER)
    for batch in list(batches(4))[2:]:
        sharded.step(batch)
    eagerly(eager, theirs, batches(4))
    _equal(sharded.full_state_dict(), eager.state_dict())


def test_microbatches_and_hyperparameters_that_change() -> None:
    eager, model = Idle(), Idle()
    theirs, mine = Queue(eager.parameters()), Queue(model.parameters())
    sharded = compile_sharded(model, mine, loss=loss, policy=EAGER)
    for index, batch in enumerate(batches(5)):
        for optimizer in (theirs, mine):
            optimizer.param_groups[0]["decay"] = 0.1 * index
        sharded.accumulate(batch[:2])
        sharded.step(batch[2:])
        eagerly(eager, theirs, [batch])
    _equal(sharded.full_state_dict(), eager.state_dict())
    assert sharded.captures == 2


def test_the_state_is_seen_and_written() -> None:
    model = Idle()
    sharded = compile_sharded(model, Queue(model.parameters()), loss=loss, policy=EAGER)
    data = list(batches(5))
    for batch in data:
        sharded.step(batch)
    state = sharded.state.optimizer
    assert {name for name in state if name.startswith("up.bias")} == {
        "up.bias.queue_0", "up.bias.queue_1", "up.bias.queue_2", "up.bias.seen",
    }  # fmt: skip
    assert not any(name.startswith("idle") for name in state)
    state["up.bias.seen"].fill_(1)
    state["up.bias.queue_1"] = state["up.bias.queue_1"] * 0
    before = sharded.full_state_dict()["up.bias"]
    rows = state["up.bias.queue_2"].clone()
    sharded.step(data[0])  # the sixth: no update but decay
    assert sharded.state.optimizer["up.bias.seen"] == 2
    assert torch.equal(sharded.state.optimizer["up.bias.queue_1"], rows)
    torch.testing.assert_close(sharded.full_state_dict()["up.bias"], before * 0.99)
    sharded.state.optimizer["up.bias.more"] = torch.zeros(())
    with pytest.raises(ValueError, match=r"'up\.bias\.more' was put into sharded\.state\.optimizer"):
        sharded.step(data[0])


def test_a_step_that_overflows_does_not_run() -> None:
    model = Idle()
    optimizer = Queue(model.parameters())
    policy = Policy(lower="eager", shard="zero1", loss_scale="dynamic")
    sharded = compile_sharded(model, optimizer, loss=loss, policy=policy)
    before = sharded.full_state_dict()
    sharded.step(torch.full((4, 6), float("inf")))
    assert sharded.overflows == 1 and optimizer.param_groups[0]["step"] == 0
    _equal(sharded.full_state_dict(), before)
    sharded.step(next(batches(1)))
    assert optimizer.param_groups[0]["step"] == 1


def test_an_operator_that_mixes_elements_stops_the_step_whenever_it_comes() -> None:
    model = Idle()
    sharded = compile_sharded(model, LateNorm(model.parameters()), loss=loss, policy=EAGER)
    for batch in batches(16):
        sharded.step(batch)
    for _ in range(2):  # nobody can go on from there
        with pytest.raises(RuntimeError, match=r"LateNorm runs as it is.*its step uses aten\.linalg_vector_norm"):
            sharded.step(torch.ones(4, 6))


def test_what_does_otherwise_on_pieces_gets_whole_parameters() -> None:
    assert make_rules(ByDim([nn.Parameter(torch.ones(2, 3))]))[0].whole
    assert not make_rules(Queue([nn.Parameter(torch.ones(2, 3))]))[0].whole


def test_calls_that_cannot_be_made_are_refused() -> None:
    model = Idle()
    sharded = compile_sharded(model, Queue(model.parameters()), loss=loss, policy=EAGER)
    with pytest.raises(ValueError, match="apply with Queue, which runs as it is"):
        sharded.apply(sharded.state, torch.ones(4, 6))
    with pytest.raises(ValueError, match=r"state_dict with Queue, which runs as it is.* Call save and load"):
        sharded.state_dict()
    with pytest.raises(RuntimeError, match=r"sharded\.step"):
        sharded.optimizer.step()  # type: ignore[union-attr]
    sharded.step(torch.ones(4, 6))


def test_an_option_that_no_longer_runs_on_pieces_is_refused() -> None:
    adashift = pytest.importorskip("pytorch_optimizer").AdaShift
    model = Idle()
    optimizer = adashift(model.parameters(), reduce_func=None, keep_num=2)
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    eager = Idle()
    theirs = adashift(eager.parameters(), reduce_func=None, keep_num=2)
    for batch in batches(4):
        sharded.step(batch)
        eagerly(eager, theirs, [batch])
    _equal(sharded.full_state_dict(), eager.state_dict())
    optimizer.reduce_func = torch.max
    with pytest.raises(ValueError, match=r"AdaShift is not supported: its step uses aten\.max\.default"):
        sharded.step(torch.ones(4, 6))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.flip(0), torch.sum, lambda x: x.cumsum(0), torch.sort, torch.rand_like, lambda x: x.view(2, 3),
        lambda x: x[1:], lambda x: torch.arange(6) * x, lambda x: torch._foreach_norm([x]),
        lambda x: torch.equal(x, x.clone()),
    ],
)  # fmt: skip
def test_operators_on_pieces(call: Callable[..., Any]) -> None:
    x = torch.ones(6)
    with PointwiseOnly():
        x.mul_(2).add_(torch.zeros_like(x)).clamp(min=0)
        torch._foreach_add_([x, torch.ones(3)], 1.0)
        with pytest.raises(Refused, match="its step"):
            call(x)


def test_on_two_ranks() -> None:
    """Under each placement: the weights of eager PyTorch on all rows, and rates that differ are an error."""
    found = launch(Path(__file__).parent / "workers" / "eager_update.py", 2)
    assert not any(found.values()), json.dumps(found, indent=1)
    assert len(found) == 4
