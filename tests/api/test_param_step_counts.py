"""Parameters that only some steps reach: an optimizer counts the steps of each, and a group here has one count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.runtime.param_step_counts import StepCounts, of_group
from tests.chosen import chosen
from tests.launch import launch
from tests.simulate import stages
from tests.two_tasks import KINDS, Heads, loss_of, optimizer_of

POLICY = Policy(lower="eager")


class Pair:
    """Plain PyTorch's loop and ours, of equal models."""

    def __init__(self, kind: str, apart: bool = False, before: tuple[bool, ...] = ()) -> None:
        torch.manual_seed(0)
        self.plain, self.model = Heads(), Heads()
        self.model.load_state_dict(self.plain.state_dict())
        self.theirs, self.optimizer = (optimizer_of(kind, one, apart) for one in (self.plain, self.model))
        for both in before:
            x = torch.randn(3, 4)
            for model, optimizer in ((self.plain, self.theirs), (self.model, self.optimizer)):
                _eager_step(model, optimizer, [(x, both)])
        self.sharded = compile_sharded(self.model, self.optimizer, loss=loss_of, policy=POLICY)

    def step(self, *row: bool) -> None:
        batches = [(torch.randn(3, 4), both) for both in row]
        for batch in batches[:-1]:
            self.sharded.accumulate(*batch)
        self.sharded.step(*batches[-1])
        _eager_step(self.plain, self.theirs, batches)

    def check(self) -> None:
        for name, value in self.sharded.full_state_dict().items():
            assert torch.equal(value, self.plain.state_dict()[name]), name


def _eager_step(model: nn.Module, optimizer: optim.Optimizer, batches: list[tuple[torch.Tensor, bool]]) -> None:
    optimizer.zero_grad()
    for x, both in batches:
        (loss_of(model, x, both) / len(batches)).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_their_own_count_their_own_steps(kind: str) -> None:
    pair = Pair(kind, apart=True)
    for both in (False, False, True, False, True, True):
        pair.step(both)
    pair.check()


@pytest.mark.parametrize(("kind", "order"), [("AdamW", (False, True)), ("Rprop", (True, False))])
def test_a_step_that_parts_a_group_is_refused_before_anything_is_changed(kind: str, order: tuple[bool, bool]) -> None:
    pair = Pair(kind)
    pair.step(order[0])
    before = pytree.tree_map(torch.clone, pair.sharded.state)
    name = "head.bias, head.weight"
    what = f"updates {name} for the first time" if order[1] else f"does not reach {name}, which made the steps before"
    with pytest.raises(ValueError, match=f"{what}.*nothing was updated.*groups of their own"):
        pair.sharded.step(torch.randn(3, 4), order[1])
    after = pytree.tree_leaves(pair.sharded.state)
    assert all(map(torch.equal, pytree.tree_leaves(before)[:-2], after[:-2]))
    pair.step(order[0])  # and all goes on
    pair.check()


def test_the_step_that_is_refused_would_have_been_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the count of the others."""
    monkeypatch.setattr(StepCounts, "check", lambda *_: None)
    pair = Pair("AdamW")
    pair.step(False)
    pair.step(True)
    with pytest.raises(AssertionError, match=r"head\."):
        pair.check()


def test_what_counts_nothing_may_be_reached_now_and_then() -> None:
    KINDS["momentum"] = lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)
    pair = Pair("momentum")
    for both in (False, True, False, True):
        pair.step(both)
    pair.check()


@pytest.mark.parametrize("row", [(True, False), (True, True, False, False)])  # and the other way round
def test_what_any_microbatch_reaches_is_updated(row: tuple[bool, ...]) -> None:
    pair = Pair("AdamW", apart=True)
    pair.step(*row)
    pair.step(*row[::-1])
    pair.step(False)
    pair.check()


@pytest.mark.parametrize(("kind", "parts"), [("step", {"trunk"}), ("last microbatch", {"trunk", "head"})])
def test_what_no_batch_reaches_is_reduced_only_where_microbatches_may_have_reached_it(
    kind: str, parts: set[str]
) -> None:
    model = Heads()
    batch, policy = (torch.randn(3, 4), False), Policy(lower="eager", accumulate="full", bucket_mb=0)
    made, plan = stages(model, optimizer_of("AdamW", model, True), loss_of, batch, policy, shard=2, kind=kind)
    reduced = [plan.buffer(node.meta["mark"].buffer) for node in made[-1].marked("reduce")]
    assert {slot.name.split(".")[0] for buffer in reduced for slot in buffer.slots} == parts


@pytest.mark.parametrize("kind", chosen(KINDS, ["AdamW", "dampened"]))
def test_an_optimizer_that_comes_with_steps_of_some(kind: str) -> None:
    pair = Pair(kind, before=(False, False))
    pair.step(False)
    pair.check()
    with pytest.raises(ValueError, match="for the first time"):
        Pair(kind, before=(False, False)).step(True)
    pair = Pair(kind, apart=True, before=(False, False))
    pair.step(True)
    pair.check()


def _by_save(sharded: Any, other: Any, folder: Path) -> None:
    sharded.save(folder, wait=True)
    other.load(folder)


def _by_dcp(sharded: Any, other: Any, _: Path) -> None:
    other.load_state_dict(copy.deepcopy(sharded.state_dict()))


def _by_torch(sharded: Any, other: Any, _: Path) -> None:
    other.load_full_state_dict(sharded.full_state_dict())
    other.load_full_optimizer_state_dict(sharded.full_optimizer_state_dict())


@pytest.mark.parametrize(
    ("way", "kind"), [(_by_save, "AdamW"), (_by_dcp, "AdamW"), (_by_torch, "AdamW"), (_by_torch, "dampened")]
)
def test_who_made_the_steps_is_saved(way: Callable[..., None], kind: str, tmp_path: Path) -> None:
    pair, again = Pair(kind), Pair(kind)
    pair.step(False)
    again.step(True)
    way(pair.sharded, again.sharded, tmp_path)
    pair.sharded = again.sharded
    with pytest.raises(ValueError, match="for the first time"):
        pair.sharded.step(torch.randn(3, 4), True)
    pair.step(False)
    pair.check()


@pytest.mark.parametrize("kind", ["AdamW", "dampened"])
def test_plain_pytorch_goes_on_from_what_is_collected(kind: str) -> None:
    pair = Pair(kind)
    pair.step(False)
    plain = Heads()
    plain.load_state_dict(pair.sharded.full_state_dict())
    optimizer = optimizer_of(kind, plain, False)
    optimizer.load_state_dict(pair.sharded.full_optimizer_state_dict())
    x = torch.randn(3, 4)
    for one, other in ((plain, optimizer), (pair.plain, pair.theirs)):
        _eager_step(one, other, [(x, True)])
    for name, value in plain.state_dict().items():
        assert torch.equal(value, pair.plain.state_dict()[name]), name


def test_two_ranks_train_as_one_process() -> None:
    assert launch(Path(__file__).parents[1] / "workers" / "param_step_counts.py", 2)


def test_whose_numbers_are_a_group_s() -> None:
    """Theirs who have made steps, in which they must agree; everyone's where nobody has."""
    (rule,) = make_rules(optim.AdamW([nn.Parameter(torch.ones(2, 2))]))
    old, new = {"step": 3.0}, {"step": 0.0}
    assert of_group(rule, {"a": old, "b": new, "c": {}}) == (frozenset("a"), {"a": old})
    assert of_group(rule, {"a": new, "b": {}}) == (frozenset(), {"a": new, "b": {}})


def test_an_optimizer_that_is_loaded_between_microbatches_drops_no_gradient() -> None:
    """Its own state, so that nothing changes."""

    def trained(loads: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, x = Heads(), torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        sharded = compile_sharded(model, optimizer, loss=loss_of, policy=Policy(lower="eager"))
        for both in (True, False):
            sharded.step(x, both)
        saved = sharded.full_optimizer_state_dict()
        sharded.accumulate(x, True)
        if loads:
            sharded.load_full_optimizer_state_dict(saved)
        before = sharded.full_state_dict()["head.weight"]
        sharded.step(x, False)
        found = sharded.full_state_dict()
        assert not torch.equal(found["head.weight"], before), "the microbatch before reached it"
        return found

    with_it, without = trained(True), trained(False)
    assert all(torch.equal(with_it[name], value) for name, value in without.items())
