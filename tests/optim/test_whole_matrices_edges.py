"""What a person may do around an optimizer of whole matrices: as eager PyTorch, or refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import optim
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.runtime.checkpoint.convert import convert
from tests.launch import launch
from tests.matrices import Matrices, batches, loss

EAGER = Policy(lower="eager")


def test_on_ranks_and_from_other_numbers_of_them(tmp_path: Path) -> None:
    """Three ranks, then two, which load what three saved: see the worker."""
    script = Path(__file__).parents[1] / "workers" / "whole_matrices_edges.py"
    three = launch(script, 3, str(tmp_path))
    two = launch(script, 2, str(tmp_path))
    assert not any([*three.values(), *two.values()]), json.dumps([three, two], indent=1)
    assert "from another world" in two and "from another world" not in three


def _sharded(**options: Any) -> tuple[Any, Any]:
    model = Matrices(**options)
    optimizer = optim.Muon(model.parameters(), lr=0.02)
    return compile_sharded(model, optimizer, loss=loss, policy=EAGER), optimizer


def test_the_optimizer_s_own_state_dicts_are_refused_with_the_cure() -> None:
    sharded, optimizer = _sharded()
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(RuntimeError, match="taken over by compile_sharded"):
            call()
    sharded.step(next(batches(1)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("steps", [2, 0])
def test_dcp_goes_on_bit_for_bit_before_a_first_step_and_after(steps: int, tmp_path: Path) -> None:
    """Into one that has made no step, and into one that has: what was kept there is forgotten."""
    data = list(batches(6))
    one, _ = _sharded()
    for batch in data[:steps]:
        one.step(batch)
    dcp.save({"app": one}, checkpoint_id=tmp_path, no_dist=True)
    one.step(data[3])
    wanted = one.full_state_dict()
    for before in (0, 1):
        other, _ = _sharded()
        for batch in data[4 : 4 + before]:
            other.step(batch)
        dcp.load({"app": other}, checkpoint_id=tmp_path, no_dist=True)
        assert bool(other.state.optimizer) == (steps > 0)
        other.step(data[3])
        found = other.full_state_dict()
        assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    convert(tmp_path, tmp_path / "ours", "ours")
    other.load(tmp_path / "ours")
    assert bool(other.state.optimizer) == (steps > 0)
    other.step(data[3])
    found = other.full_state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    for kind in (optim.Adafactor, optim.AdamW) if steps else ():  # of another class
        model = Matrices()
        another = compile_sharded(model, kind(model.parameters(), lr=0.02), loss=loss, policy=EAGER)
        with pytest.raises(ValueError, match=r"momentum_buffer|keeps more than tensors"):
            another.load(tmp_path / "ours")
    if steps:  # as FSDP2 saves it
        eager = Matrices()
        theirs = optim.Muon(eager.parameters(), lr=0.02)
        for batch in (*data[:steps], data[3]):
            if batch is data[3]:
                weights, kept = get_state_dict(eager, theirs)
                dcp.save({"model": weights, "optim": kept}, checkpoint_id=tmp_path / "fsdp2", no_dist=True)
            theirs.zero_grad()
            loss(eager, batch).backward()
            theirs.step()
        convert(tmp_path / "fsdp2", tmp_path / "converted", "ours")
        other.load(tmp_path / "converted")
        other.step(data[3])
        found = other.full_state_dict()
        assert all(torch.equal(value, found[name]) for name, value in eager.state_dict().items())
    fresh, _ = _sharded()  # only what FSDP2 saves too is read
    given = fresh.state_dict()
    given["optim"]["state"]["mix"]["momentum_buffer"].fill_(2.0)
    fresh.load_state_dict(given)
    assert fresh.state.optimizer.keys() == {"mix.momentum_buffer"}
    given = one.state_dict()
    given["optim"]["state"]["mix"]["momentum_buffer"] += 1  # the state itself: DCP writes into it
    given["optim"]["state"]["mix"] = {"momentum_buffer": torch.ones(2, 3)}
    before_it = {key: value.clone() for key, value in one.state.optimizer.items()}
    with pytest.raises(ValueError, match="keeps momentum_buffer of mix in another shape"):
        one.load_state_dict(given)
    assert all(torch.equal(value, before_it[key]) for key, value in one.state.optimizer.items())
    given["optim"]["state"]["mix"] = {"momentum_buffer": (theirs := torch.ones(6, 6))}
    one.load_state_dict(given)
    theirs.zero_()  # it was copied
    assert torch.equal(one.state.optimizer["mix.momentum_buffer"], torch.ones(6, 6))


def test_dcp_is_refused_where_the_form_of_state_is_not_known_beforehand() -> None:
    model = Matrices()
    sharded = compile_sharded(model, optim.Adafactor(model.parameters()), loss=loss, policy=EAGER)
    for call in (sharded.state_dict, lambda: sharded.load_state_dict({})):
        with pytest.raises(ValueError, match=r"with Adafactor, .* it keeps more than tensors of .* Call save and load"):
            call()
    part, _ = _sharded(idle=True)
    part.state_dict()
    part.step(next(batches(1)))
    with pytest.raises(ValueError, match=r"state_dict where idle has no state .* Call save and load"):
        part.state_dict()


class CountsInItsGroup(optim.Muon):
    """And keeps a list for each parameter; its steps grow shorter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                seen = self.state[p].setdefault("seen", [torch.zeros(p.shape[0]), 0])
                seen[0].add_(p.grad.square().sum(1))
                seen[1] += 1
                p.mul_(1 - 0.01 * seen[0].mean() / (seen[1] * group["count"]))


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor, CountsInItsGroup])
def test_plain_optimizer_state_both_ways_and_back_to_the_beginning(kind: Any) -> None:
    """What PyTorch's own loop left goes on here, and what this left goes on there, bit for bit."""
    model = Matrices()
    sharded = compile_sharded(model, kind(model.parameters(), lr=0.02), loss=loss, policy=EAGER)
    data = list(batches(6))
    for steps in (3, 0):  # what it had is forgotten
        theirs = Matrices()
        optimizer = kind(theirs.parameters(), lr=0.02)
        _eagerly(theirs, optimizer, data[:steps])
        sharded.load_full_state_dict(theirs.state_dict())
        sharded.load_full_optimizer_state_dict(copy.deepcopy(optimizer.state_dict()))
        _eagerly(theirs, optimizer, data[3:5])
        for batch in data[3:5]:
            sharded.step(batch)
        mine = sharded.full_state_dict()
        assert all(torch.equal(value, mine[name]) for name, value in theirs.state_dict().items())
    other = Matrices()
    plain = kind(other.parameters(), lr=0.02)
    other.load_state_dict(sharded.full_state_dict())
    plain.load_state_dict(sharded.full_optimizer_state_dict())
    for one, its in ((theirs, optimizer), (other, plain)):
        _eagerly(one, its, data[5:])
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in theirs.state_dict().items())
    fresh = kind(other.parameters(), lr=0.02)  # control
    other.load_state_dict(sharded.full_state_dict())
    _eagerly(other, fresh, data[5:])
    assert not all(torch.equal(value, other.state_dict()[name]) for name, value in theirs.state_dict().items())


def _eagerly(model: Any, optimizer: Any, data: Any) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


class CountsInAnAttribute(optim.Muon):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        super().step()


class ItsOwnForm(optim.Muon):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


def test_optimizer_state_that_is_another_s_or_not_all_is_refused() -> None:
    sharded, _ = _sharded()
    sharded.step(next(batches(1)))
    before = {key: value.clone() for key, value in sharded.state.optimizer.items()}
    model = Matrices()
    for kind, match in ((optim.AdamW, "has no 'momentum_buffer', which Muon keeps: it is another optimizer's"),
                        (optim.Muon, r"momentum_buffer of mix has shape \[2, 3\]")):  # fmt: skip
        other = kind(model.parameters(), lr=0.02)
        _eagerly(model, other, batches(1))
        if kind is optim.Muon:
            other.state[model.mix]["momentum_buffer"] = torch.ones(2, 3)
        with pytest.raises(ValueError, match=match):
            sharded.load_full_optimizer_state_dict(other.state_dict())
    assert all(torch.equal(value, sharded.state.optimizer[key]) for key, value in before.items())
    for kind, match in (
        (CountsInAnAttribute, "counts in its attribute 'count'"),
        (ItsOwnForm, "state_dict of its own"),
    ):
        model = Matrices()
        own = kind(model.parameters(), lr=0.02)
        plain = own.state_dict()
        one = compile_sharded(model, own, loss=loss, policy=EAGER)
        with pytest.raises(ValueError, match=match):
            one.full_optimizer_state_dict()
        with pytest.raises(ValueError, match=match):
            one.load_full_optimizer_state_dict(plain)


@pytest.mark.parametrize("trained", [True, False])
def test_thawing_and_freezing_later_is_refused(trained: bool) -> None:
    model = Matrices()
    weight = model.layers[0].up.weight  # type: ignore[union-attr]
    weight.requires_grad_(not trained)
    optimizer = optim.Muon(model.parameters(), lr=0.02)
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
    sharded.step(next(batches(1)))
    with pytest.raises((RuntimeError, ValueError), match=r"requires_grad|frozen|trained"):
        model.layers[0].up.weight.requires_grad_(trained)  # type: ignore[union-attr]
        sharded.step(next(batches(1)))


def test_a_rate_that_is_a_tensor() -> None:
    weights = []
    for ours in (False, True):
        model, rate = Matrices(), torch.tensor(0.02)
        optimizer = optim.Muon(model.parameters(), lr=rate)  # type: ignore[arg-type]
        sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER) if ours else None
        for index, batch in enumerate(batches(3)):
            rate.fill_(0.02 / (index + 1))
            if sharded is not None:
                sharded.step(batch)
            else:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        weights.append(sharded.full_state_dict() if sharded is not None else model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_state_that_a_person_writes_is_what_the_next_step_reads() -> None:
    theirs, mine = Matrices(), Matrices()
    other = optim.Muon(theirs.parameters(), lr=0.02)
    sharded = compile_sharded(mine, optim.Muon(mine.parameters(), lr=0.02), loss=loss, policy=EAGER)
    for index, batch in enumerate(batches(3)):
        if index == 2:
            other.state[theirs.mix]["momentum_buffer"].mul_(-3)
            sharded.state.optimizer["mix.momentum_buffer"].mul_(-3)
        other.zero_grad()
        loss(theirs, batch).backward()
        other.step()
        sharded.step(batch)
    found = sharded.full_state_dict()
    assert all(torch.equal(value, found[name]) for name, value in theirs.state_dict().items())
