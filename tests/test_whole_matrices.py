"""Optimizers that need whole matrices: each is updated by its owner, as eager PyTorch does it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.optim.whole import is_known
from fsdp_compiled.plan.leaf import Leaf
from fsdp_compiled.plan.make_plan import make_plan
from fsdp_compiled.plan.owners import dealt, laid_out, update_cost
from fsdp_compiled.plan.plan import Plan
from tests.launch import launch
from tests.matrices import Matrices, batches, loss
from tests.parts import parts

EAGER = Policy(lower="eager")


class Own(optim.Optimizer):
    """Users' own, that take whole parameters; what each mixes is its own affair."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.total = 0.0
        self.norms: list[torch.Tensor] = []

    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        return grad.norm()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / self.scale(group, grads, p.grad), alpha=group["lr"])


class ByAllNorms(Own):
    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        return torch.stack([one.norm() for one in grads]).norm()


class ByAllNumbers(Own):
    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        return sum(one.norm().item() for one in grads)


class ByCount(Own):
    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        return grad.norm() * len(group["params"])


class OnlyLate(Own):
    """Sums over parameters, and uses that at a step to which no trial comes."""

    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        sums = torch.zeros(())
        for one in grads:
            sums += one.norm()
        group["step"] = group.get("step", 0) + 1
        return sums if group["step"] > 10**6 else grad.norm()


class CountsItsOwn(Own):
    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        self.total += float(grad.norm())
        return grad.norm()


class Draws(Own):
    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        return grad.norm() + torch.rand(())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ByAllNorms, "its step mixes parameters"),
        (ByAllNumbers, "how it updates a parameter depends on which others it has"),
        (ByCount, "how it updates a parameter depends on which others it has"),
        (OnlyLate, "its step mixes parameters"),
        (CountsItsOwn, "its 'total' depends on which parameters it has"),
        (Draws, "its step draws random numbers"),
    ],
)
def test_what_depends_on_other_parameters_is_refused(kind: type[Own], reason: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} is not supported: {reason}"):
        make_rules(kind([nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]))


@pytest.mark.parametrize("dims", [0, 1, 2, 3, 4, 5])
def test_whole_parameters_of_any_shape(dims: int) -> None:
    (rule,) = make_rules(Own([nn.Parameter(torch.randn((2,) * dims))]))
    assert rule.whole and "does not keep every element" in (rule.eagerly or "")


def test_work_is_divided_by_cost() -> None:
    assert dealt([9, 4, 4, 1], 2) == [0, 1, 1, 1]
    assert update_cost((4, 8)) == update_cost((8, 4)) == 128 and update_cost((5,)) == 5 and update_cost(()) == 1
    costs = [update_cost((64, 256)), update_cost((256, 64)), *[update_cost((64, 64))] * 4] * 6
    owners = dealt(costs, 4)
    loads = [sum(cost for cost, rank in zip(costs, owners, strict=True) if rank == one) for one in range(4)]
    assert max(loads) < 1.05 * sum(costs) / 4


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(2, 5))
def test_what_a_rank_has_already_changes_who_not_how_much(sizes: list[int], ranks: int) -> None:
    order = laid_out(sizes, ranks)
    assert sorted(order) == list(range(len(sizes)))
    ends = list(itertools.accumulate((sizes[index] for index in order), initial=0))
    each = sum(sizes) / ranks
    held = [[0] * ranks for _ in sizes]
    for index, (first, last) in zip(order, itertools.pairwise(ends), strict=True):
        for rank in range(ranks):
            held[index][rank] = int(1e3 * max(min(last, (rank + 1) * each) - max(first, rank * each), 0))
    costs = [float(size**2) for size in sizes]

    def busiest(owners: list[int]) -> float:
        return max(sum(cost for cost, who in zip(costs, owners, strict=True) if who == rank) for rank in range(ranks))

    assert busiest(dealt(costs, ranks, held)) <= busiest(dealt(costs, ranks))


def test_few_matrices_are_cut_and_owners_have_most_of_theirs() -> None:
    """A block's matrices are 3, 1, 4 and 4 squares; 6 are a rank's. Of all 48, 24 would have to go to owners, and 8 do
    where all are laid out alike."""
    assert laid_out([3, 1, 4, 4], 2) == [2, 1, 0, 3]
    rows = [(3, 1, 4, 4)[index] for index in laid_out([3, 1, 4, 4], 2)] * 4
    held = [[4, 0], [1, 0], [1, 2], [0, 4]] * 4
    owners = dealt([64.0**2 * row for row in rows], 2, held)
    assert sum(row for row, who in zip(rows, owners, strict=True) if who) == 24
    assert sum(parts[1 - who] for parts, who in zip(held, owners, strict=True)) == 8


def _blocks(shard: int, rows: int = 96, policy: Policy = replace(EAGER, bucket_mb=0), device: str = "cpu") -> Plan:
    """Of four blocks, of a transformer's four matrices each."""
    shapes = [(rows, 32), (32, 32), (128, 32), (32, 128)]
    leaves = [
        Leaf((f"{layer}.{index}",), shape, (shape[1], 1), torch.float32, True, 0, str(layer), owned=True)
        for layer in range(4)
        for index, shape in enumerate(shapes)
    ]
    return make_plan(leaves, policy, torch.device(device), shard)


def _sent(plan: Plan) -> int:
    """Elements to owners; their loads must be as even as can be."""
    costs = {slot.name: update_cost(slot.leaf.shape) for slot, _ in plan._owned}
    loads = [sum(costs[name] for name, who in plan.owners.items() if who == rank) for rank in range(plan.shard)]
    assert max(loads) == max(sum(costs.values()) / plan.shard, *costs.values())
    return sum(sum(held) - held[plan.owners[slot.name]] for slot, held in plan._owned)


def _orders(plan: Plan) -> list[list[str]]:
    return [[slot.name.split(".")[1] for slot in buffer.slots] for buffer in plan.buffers]


@pytest.mark.parametrize(("device", "shard"), [("cuda", "zero3"), ("cpu", "zero1")])
def test_every_other_unit_is_laid_out_from_its_end(device: str, shard: str) -> None:
    """So that of four such blocks no rank has more to do, and half as much goes to owners."""
    plan = _blocks(2, policy=Policy(shard, lower="eager", bucket_mb=0), device=device)
    assert _orders(plan) == [["2", "1", "0", "3"], ["3", "0", "1", "2"]] * 2
    assert _sent(plan) == 4 * 32**2 and not plan.filled and not any(buffer.padding for buffer in plan.buffers)


def test_between_two_ranks_of_cpus_no_matrix_is_cut() -> None:
    """A rank has 7 squares of 12 of one block and 5 of the next; what is missing is padding, which is not sent."""
    plan = _blocks(2)
    assert _orders(plan) == [["0", "2", "1", "3"], ["3", "1", "2", "0"]] * 2
    assert _sent(plan) == 0 and [buffer.padding for buffer in plan.buffers] == [2 * 32**2] * 4
    assert list(plan.filled.values()) == [(7 * 32**2, 5 * 32**2), (5 * 32**2, 7 * 32**2)] * 2
    assert "0 B a rank to owners and 0 B back" in str(plan)
    assert not _blocks(2, rows=512).filled  # padding would be a quarter of what there is


def _beside_eager(
    make: Callable[[nn.Module], optim.Optimizer], policy: Policy = EAGER, steps: int = 5, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """Weights by eager PyTorch and here, of the same steps with changing rates."""
    sides = []
    for ours in (False, True):
        model = Matrices(**options)
        optimizer = make(model)
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.3, 2.0)[step % 3])
        sharded: Any = compile_sharded(model, optimizer, loss=loss, policy=policy) if ours else None
        for batch in batches(steps):
            if ours:
                sharded.step(batch)
            else:
                optimizer.zero_grad()
                loss(model, batch).backward()
                if policy.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), policy.clip)
                optimizer.step()
            schedule.step()
        sides.append(sharded.full_state_dict() if ours else model.state_dict())
    return sides[0], sides[1], sharded


def _muon(model: nn.Module) -> optim.Optimizer:
    return optim.Muon(model.parameters(), lr=0.02, weight_decay=0.2)


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor])
def test_as_in_eager_pytorch(kind: Any) -> None:
    theirs, mine, sharded = _beside_eager(lambda model: kind(model.parameters(), lr=0.02, weight_decay=0.2))
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    assert sharded.captures == 1
    other, _, _ = _beside_eager(lambda model: kind(model.parameters(), lr=0.021, weight_decay=0.2))  # control
    assert not all(torch.equal(mine[name], value) for name, value in other.items())


def test_clipping_and_inductor() -> None:
    theirs, mine, _ = _beside_eager(_muon, Policy(lower="inductor", clip=0.01), steps=3)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() != 2], "lr": 0.01}]


class Mixed(Own):
    """Orthogonal for matrices, by the sign for the rest, chosen by an option of the group."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        optim.Optimizer.__init__(self, [{**groups[0], "whole": True}, {**groups[1], "whole": False}], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.3)
                p.sub_(mean / mean.norm() if group["whole"] else mean.sign(), alpha=group["lr"])


def test_groups_that_can_be_traced_stay_in_the_program() -> None:
    theirs, mine, sharded = _beside_eager(lambda model: Mixed(_groups(model)), bias=True)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-6, atol=1e-7)
    keys = set(sharded.state.optimizer)
    assert "layers.0.up.weight.mean" in keys and "layers.0.up.bias.mean" not in keys
    assert any(key.endswith("#1.mean") for key in keys)  # of a buffer


def test_what_cannot_be_done_is_refused() -> None:
    model = Matrices()
    sharded = compile_sharded(model, _muon(model), loss=loss, policy=EAGER)
    batch = next(iter(batches(1)))
    with pytest.raises(ValueError, match="apply with Muon, which runs as it is, on whole parameters"):
        sharded.apply(sharded.state, batch)
    sharded.step(batch)


def test_a_frozen_and_an_idle_matrix_stay_as_they_are() -> None:
    model = Matrices(idle=True)
    model.layers[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = compile_sharded(model, _muon(model), loss=loss, policy=EAGER)
    for batch in batches(2):
        sharded.step(batch)
    after = sharded.full_state_dict()
    same = {name for name, value in before.items() if torch.equal(after[name], value)}
    assert same == {"idle", "layers.1.up.weight"}


def test_a_step_that_overflows_does_not_run() -> None:
    model = Matrices()
    sharded = compile_sharded(model, _muon(model), loss=loss, policy=Policy(lower="eager", loss_scale="dynamic"))
    before = sharded.full_state_dict()
    sharded.step(torch.full((6, 6), float("inf")))
    assert sharded.overflows == 1 and not sharded.state.optimizer
    assert all(torch.equal(value, before[name]) for name, value in sharded.full_state_dict().items())


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.exhaustive) for world in (3, 4))])
def test_on_ranks(world: int, tmp_path: Path) -> None:
    """Every placement, accumulation, state that is brought along, a failing owner: see the worker.

    What was saved there goes on here, on one rank."""
    found = launch(Path(__file__).parent / "workers" / "whole_matrices.py", world, str(tmp_path))
    assert not any(found.values()), json.dumps(found, indent=1)
    assert len(found) >= (2 if world == 3 else 6)
    model = Matrices(bias=True)
    sharded = compile_sharded(model, _plain_pair(model), loss=loss, policy=EAGER)
    assert sharded.load(tmp_path) == 2
    for batch in list(batches(4))[2:]:
        sharded.step(batch)
    mine = sharded.full_state_dict()
    for name, value in torch.load(tmp_path / "weights.pt").items():  # sums of gradients in another order
        torch.testing.assert_close(mine[name], value, rtol=0, atol=2e-3)


def _plain_pair(model: nn.Module) -> list[optim.Optimizer]:
    first, second = _groups(model)
    return [optim.Muon(first["params"], lr=0.02), optim.AdamW(second["params"], lr=0.01)]


def _pair(model: nn.Module) -> list[optim.Optimizer]:
    first, second = _groups(model)
    return [
        optim.Muon(first["params"], lr=0.02, weight_decay=0.2),
        optim.AdamW(second["params"], lr=0.01, weight_decay=0.3),
    ]


def _pair_steps(model: nn.Module, optimizers: list[optim.Optimizer], step: Callable[[torch.Tensor], Any]) -> None:
    """With a schedule for each, and an option that changes."""
    schedules = [optim.lr_scheduler.LambdaLR(one, lambda count: 1 / (1 + count)) for one in optimizers]
    for index, batch in enumerate(batches(4)):
        for one in optimizers:
            one.param_groups[0]["weight_decay"] = 0.1 + 0.1 * (index > 2)
        step(batch)
        for schedule in schedules:
            schedule.step()


def test_muon_for_matrices_and_adamw_for_the_rest() -> None:
    eager, model = Matrices(bias=True), Matrices(bias=True)
    theirs, mine = _pair(eager), _pair(model)

    def eagerly(batch: torch.Tensor) -> None:
        for one in theirs:
            one.zero_grad()
        loss(eager, batch).backward()
        for one in theirs:
            one.step()

    with parts() as of:
        sharded = compile_sharded(model, mine, loss=loss, policy=EAGER)
    _pair_steps(eager, theirs, eagerly)
    _pair_steps(model, mine, sharded.step)
    found = sharded.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in eager.state_dict().items())
    assert "updated whole: 7 parameters" in str(sharded.plan)
    for one in mine:
        with pytest.raises(RuntimeError, match="was taken over by compile_sharded"):
            one.step()
    mine[0].momentum = 3.0  # type: ignore[attr-defined]
    assert of(sharded).hyperparameters.changed(of(sharded).programs.rules) == ["optimizer.momentum"]


def test_lists_that_are_none() -> None:
    model = Matrices()
    matrices = list(model.parameters())
    with pytest.raises(ValueError, match="AdamW and SGD both hold a parameter of shape"):
        compile_sharded(model, [optim.AdamW(matrices), optim.SGD(matrices[:1])], loss=loss, policy=EAGER)
    with pytest.raises(ValueError, match=r"optimizer is a list of \[int\]; expected torch.optim.Optimizers"):
        compile_sharded(model, [3], loss=loss, policy=EAGER)  # type: ignore[list-item]


class CountsCalls(Own):
    """Reads at no step that any trial comes to what it counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made = getattr(self, "made", 0) + 1
        super().step()
        if self.made > 10**6:
            self.param_groups[0]["params"][0].zero_()


class KeepsAnObject(Own):
    """That counts calls, and says nothing of itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = itertools.count()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        next(self.count)
        super().step()


def test_in_several_calls_where_these_come_to_the_same() -> None:
    for kind, apart in ((optim.Muon, True), (optim.Adafactor, True), (Own, True), (CountsCalls, False),
                        (KeepsAnObject, False), (Counting, False)):  # fmt: skip
        (rule,) = make_rules(kind([nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4, 2))]))
        assert rule.whole and rule.apart == apart, kind.__name__


class Counting(Own):
    """Counts in its group; what it keeps of a parameter is of no shape of the parameter's."""

    def scale(self, group: dict[str, Any], grads: list[torch.Tensor], grad: torch.Tensor) -> Any:
        return grad.norm() * group["step"] * self.made

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self.made = getattr(self, "made", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    rows = self.state[p].setdefault("rows", [torch.zeros(p.shape[0]), 0])
                    rows[0].add_(p.grad.square().sum(tuple(range(1, p.dim()))))
                    rows[1] += 1
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    p.mul_(1 - 0.001 * self.state[p]["rows"][0].mean() * self.state[p]["rows"][1])


@pytest.mark.parametrize("make", [_pair, lambda model: Counting(model.parameters())], ids=["pair", "Counting"])
def test_a_checkpoint_goes_on_bit_for_bit(make: Any, tmp_path: Path) -> None:
    data = list(batches(6))
    weights = []
    for kept in (None, 3):
        model = Matrices(bias=True)
        sharded = compile_sharded(model, make(model), loss=loss, policy=EAGER)
        for index, batch in enumerate(data):
            if index == kept:
                sharded.save(tmp_path, wait=True)
                model = Matrices(bias=True)
                sharded = compile_sharded(model, make(model), loss=loss, policy=EAGER)
                assert sharded.load(tmp_path) == 3
            sharded.step(batch)
        weights.append(sharded.full_state_dict())
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    other = Matrices(bias=True)
    with pytest.raises(ValueError, match="the optimizer is torch"):
        compile_sharded(other, optim.AdamW(other.parameters()), loss=loss, policy=EAGER).load(tmp_path)


def test_only_pytorch_s_own_code_is_not_looked_at() -> None:
    class Mine(optim.Muon):
        pass

    assert is_known(optim.Muon) and is_known(optim.Adafactor) and is_known(optim.AdamW)
    assert not is_known(Mine) and not is_known(Own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim.Muon, "step", Own.step)
        assert not is_known(optim.Muon)
