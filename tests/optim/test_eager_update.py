"""Optimizers that are not torch.optim's run as they are: on this rank's shards, or else on whole parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim.element_wise import ShardParameter, element_wise_only
from fsdp_compiled.optim.optimizer_copy import Refused
from fsdp_compiled.optim.rules import make_rules
from tests.chosen import examples
from tests.launch import launch
from tests.untraced import Average, Idle, Noted, Queue, Scaled, batches, eagerly, groups, loss

EAGER = Policy(lower="eager", shard="zero1")


class Rebinds(Average):
    """Puts new memory where a parameter's was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - float(group["lr"]) * p.grad


class LateNorm(Average):
    """Mixes elements, but at a step that no trial comes to."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if group["step"] == 17 and p.grad is not None:
                    p.sub_(p.grad / p.grad.norm())


class ByDim(Average):
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


@pytest.mark.parametrize("kind", [Average, Rebinds, Queue])
@pytest.mark.parametrize("before", [0, 2])
def test_as_in_eager_pytorch(kind: Any, before: int, caplog: pytest.LogCaptureFixture) -> None:
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
    for index, group in enumerate(eager.param_groups):
        count = sharded.state.optimizer.get(f"group {index}.step", optimizer.param_groups[index]["step"])
        assert count == group["step"] or kind is Rebinds
    assert sharded.captures == 1
    where = "whole parameters" if kind is Queue else "shards"
    said = [record.message for record in caplog.records if "updates as it is" in record.message]
    assert len(said) == 1 and said[0].startswith(f"{kind.__name__} updates as it is, on {where}, after the program")
    assert said[0] in str(sharded.plan)


def test_notes_on_parameters_and_state_under_two_names() -> None:
    eager, model = Scaled(), Scaled()
    theirs, mine = Noted(eager.parameters()), Noted(model.parameters())
    eagerly(model, mine, batches(2))
    sharded = compile_sharded(model, mine, loss=loss, policy=EAGER)
    for batch in list(batches(4))[2:]:
        sharded.step(batch)
    eagerly(eager, theirs, batches(4))
    _equal(sharded.full_state_dict(), eager.state_dict())


@pytest.mark.parametrize("kind", [Average, Queue])
def test_microbatches_and_hyperparameters_that_change(kind: Any) -> None:
    eager, model = Idle(), Idle()
    theirs, mine = kind(eager.parameters()), kind(model.parameters())
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


@pytest.mark.parametrize("kind", [Average, Queue])
def test_a_step_that_overflows_does_not_run(kind: Any) -> None:
    model = Idle()
    optimizer = kind(model.parameters())
    policy = Policy(lower="eager", shard="zero1", loss_scale="dynamic")
    sharded = compile_sharded(model, optimizer, loss=loss, policy=policy)

    def steps() -> int:
        return int(sharded.state.optimizer.get("group 0.step", optimizer.param_groups[0]["step"]))

    before = sharded.full_state_dict()
    sharded.step(torch.full((4, 6), float("inf")))
    assert sharded.overflows == 1 and steps() == 0
    _equal(sharded.full_state_dict(), before)
    sharded.step(next(batches(1)))
    assert steps() == 1


def test_on_shards_state_is_that_of_a_traced_update() -> None:
    """Functional steps, state dictionaries for DCP and of torch.optim's form, and numbers that are written."""
    eager, model = Idle(), Idle()
    theirs, mine = Average(groups(eager)), Average(groups(model))
    sharded = compile_sharded(model, mine, loss=loss, policy=EAGER)
    rows = list(batches(6))
    for batch in rows[:2]:
        sharded.step(batch)
    copied = torch.utils._pytree.tree_map(torch.clone, sharded.state)
    for batch in rows[2:4]:
        copied, _ = sharded.apply(copied, batch)
        sharded.step(batch)
    assert all(torch.equal(one, copied.parameters[key]) for key, one in sharded.state.parameters.items())
    eagerly(eager, theirs, rows[:4])
    found, expected = sharded.full_optimizer_state_dict(), theirs.state_dict()
    for index, kept in expected["state"].items():
        _equal(found["state"][index], {name: value for name, value in kept.items() if name != "seen"})
        assert found["state"][index]["seen"] == kept["seen"]
    assert [group["step"] for group in found["param_groups"]] == [4, 4] and mine.param_groups[0]["step"] == 0
    fresh = Idle()
    other = compile_sharded(fresh, Average(groups(fresh)), loss=loss, policy=EAGER)
    other.load_state_dict(sharded.state_dict())
    assert all(torch.equal(other.state.optimizer[name], value) for name, value in sharded.state.optimizer.items())
    assert float(other.step(rows[4])) == float(sharded.value_and_grad(rows[4])[0])
    sharded.state.optimizer["group 0.step"].fill_(7)
    theirs.param_groups[0]["step"] = 7
    for batch in rows[4:]:
        sharded.step(batch)
    eagerly(eager, theirs, rows[4:])
    _equal(sharded.full_state_dict(), eager.state_dict())
    mine.calls = 3
    with pytest.raises(ValueError, match=r"optimizer\.calls was set .* sharded\.state\.optimizer\['group 0\.calls'\]"):
        sharded.step(rows[0])


def test_an_operator_that_mixes_elements_stops_the_step_whenever_it_comes() -> None:
    model = Idle()
    sharded = compile_sharded(model, LateNorm(model.parameters()), loss=loss, policy=EAGER)
    for batch in batches(16):
        sharded.step(batch)
    for _ in range(2):  # nobody can go on from there
        with pytest.raises(RuntimeError, match=r"LateNorm runs as it is.*its step uses aten\.linalg_vector_norm"):
            sharded.step(torch.ones(4, 6))


def test_what_does_otherwise_on_shards_gets_whole_parameters() -> None:
    for kind in (ByDim, Queue):
        assert make_rules(kind([nn.Parameter(torch.ones(2, 3))]))[0].whole  # type: ignore[arg-type]
    assert not make_rules(Average([nn.Parameter(torch.ones(2, 3))]))[0].whole


def test_calls_that_cannot_be_made_are_refused() -> None:
    model = Idle()
    sharded = compile_sharded(model, Queue(model.parameters()), loss=loss, policy=EAGER)
    with pytest.raises(ValueError, match="apply with Queue, which runs as it is"):
        sharded.apply(sharded.state, torch.ones(4, 6))
    with pytest.raises(ValueError, match=r"Queue counts in its attribute 'rates', which is in no state_dict"):
        sharded.full_optimizer_state_dict()
    with pytest.raises(RuntimeError, match=r"sharded\.step"):
        sharded.optimizer.step()  # type: ignore[union-attr]
    sharded.step(torch.ones(4, 6))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.flip(0), torch.sum, lambda x: x.cumsum(0), torch.sort, torch.rand_like, lambda x: x.view(2, 3),
        lambda x: x[1:], lambda x: torch.arange(6) * x, lambda x: torch._foreach_norm([x]),
        lambda x: torch.equal(x, x.clone()), lambda x: x.shape, lambda x: x.dim(), len, lambda x: x.numpy(),
    ],
)  # fmt: skip
def test_operators_on_shards(call: Callable[..., Any]) -> None:
    x = torch.ones(6)
    with element_wise_only():
        x.mul_(2).add_(torch.zeros_like(x)).clamp(min=0)
        torch._foreach_add_([x, torch.ones(3)], 1.0)
        with pytest.raises(Refused, match="its step"):
            call(x)


def test_attributes_of_parameters_are_no_shard_s() -> None:
    shard = ShardParameter(torch.ones(3))
    assert not hasattr(shard, "scale")
    shard.noted = {"scale"}.__contains__
    with pytest.raises(Refused, match="reads 'scale', an attribute of parameters"):
        getattr(shard, "scale", 1.0)


def test_on_two_ranks() -> None:
    """Under each placement: the weights of eager PyTorch on all rows, and rates that differ are an error."""
    found = launch(Path(__file__).parents[1] / "workers" / "eager_update.py", 2)
    assert not any(found.values()), json.dumps(found, indent=1)
    assert len(found) == examples(5, 8)
