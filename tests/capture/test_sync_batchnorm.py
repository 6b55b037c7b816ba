"""SyncBatchNorm on several simulated ranks against BatchNorm on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture.layers_across_ranks import check_norms, joint_moments
from fsdp_compiled.ir.nodes import is_collective
from tests.chosen import chosen
from tests.simulate import Batch, ranks, simulate, stages
from tests.toys import EAGER, mse, sgd

STEPS = 3


@contextmanager
def simulated(world: int) -> Iterator[Mapping[str, str]]:
    with ranks(world) as (first, *_):
        yield first.groups


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x) + 5.0)).mean((2, 3))
        return self.last(self.plain(x))


def batches(world: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [[(normal(4, 2, 5, 5) * (rank + 1) + rank, normal(4, 3)) for rank in range(world)] for _ in range(STEPS)]


def on_the_joined_batch(model: nn.Module, steps: list[list[Batch]]) -> nn.Module:
    optimizer = sgd(model)
    for parts in steps:
        optimizer.zero_grad()
        mse(model, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        optimizer.step()
    return model


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    # A bias before a norm has no gradient but rounding errors.
    return max(
        ((found[name] - value).norm() / value.norm()).item() for name, value in wanted.items() if name != "first.bias"
    )


@pytest.mark.parametrize(
    ("shape", "shard", "replicate"),
    chosen([(shape, 2, count) for shape in ("zero3", "ddp") for count in (1, 2)], [("zero3", 2, 2), ("ddp", 2, 1)]),
)
def test_statistics_are_those_of_the_joined_batch(shape: str, shard: int, replicate: int) -> None:
    torch.manual_seed(0)
    local = Net()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(local))
    steps = batches(shard * replicate)
    policy = Policy(shard=shape, lower="eager")
    expected = on_the_joined_batch(copy.deepcopy(local), steps)
    found = simulate(synced, sgd(synced), mse, steps, policy, shard=shard, replicate=replicate)
    weights = {name: value.detach() for name, value in expected.named_parameters()}
    assert furthest(found.parameters, weights) < 1e-5
    control = simulate(local, sgd(local), mse, steps, policy, shard=shard, replicate=replicate)
    assert furthest(control.parameters, weights) > 1e-2
    for buffers in found.buffers:
        for name, value in expected.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("replicate", "axes"), [(1, 1), (2, 2)])
def test_a_norm_adds_one_collective_an_axis_to_each_phase(replicate: int, axes: int) -> None:
    torch.manual_seed(0)
    local = Net()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(local))
    batch = batches(1)[0][0]
    counts = []
    for model in (local, synced):
        programs, _ = stages(model, sgd(model), mse, batch, Policy(lower="eager"), replicate=replicate)
        phases = [node.meta["phase"] for node in programs[-1].graph.nodes if is_collective(node)]
        counts.append({phase: phases.count(phase) for phase in ("forward", "backward")})
        assert str(programs[-1])
    added = {phase: counts[1][phase] - counts[0][phase] for phase in counts[0]}
    assert added == {"forward": 2 * axes, "backward": 2 * axes}


def test_unequal_parts_count_by_their_elements() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(2, 3, 4) + 7, 2 * torch.randn(5, 3, 4)]
    ranks = LocalTensor(dict(enumerate(parts)))
    with simulated(2) as groups, LocalTensorMode(2):
        mean, var, count = joint_moments(ranks, [(groups["shard"], 2)])
    whole = torch.cat(parts)
    for rank in range(2):
        torch.testing.assert_close(mean._local_tensors[rank], whole.mean((0, 2)))
        torch.testing.assert_close(var._local_tensors[rank], whole.var((0, 2), correction=0))
        assert count._local_tensors[rank].item() == 28


def test_unequal_losses_and_groups_of_some_ranks_are_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    with pytest.raises(ValueError, match=r'norm is a SyncBatchNorm.*weigh is "rows"'):
        compile_sharded(model, sgd(model), loss=mse, policy=Policy(weigh="rows"))
    with simulated(4):
        model.norm.process_group = dist.new_group([0, 1])
        with pytest.raises(ValueError, match="norm is a SyncBatchNorm over a process group of 2 of the 4 ranks"):
            check_norms(model.named_modules(), Policy())


def test_in_eval_mode_and_on_one_rank_it_is_batch_norm() -> None:
    torch.manual_seed(0)
    local = Net()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(local))
    steps = batches(1)
    expected = on_the_joined_batch(local, steps)
    sharded = compile_sharded(synced, sgd(synced), loss=mse, policy=Policy(lower="eager"))
    for ((x, y),) in steps:
        sharded.step(x, y)
    weights = sharded.full_state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.state_dict().items())
    programs, _ = stages(Net().eval(), None, None, (torch.randn(4, 2, 5, 5),), Policy(lower="eager"), kind="forward")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net()).eval()
    evaluated, _ = stages(model, None, None, (torch.randn(4, 2, 5, 5),), Policy(lower="eager"), kind="forward")
    assert evaluated[-1].text() == programs[-1].text()


def test_on_one_rank_it_is_batch_norm() -> None:
    """Without a momentum, too, which has a cumulative average in eager PyTorch and is refused for both."""
    x = torch.randn(8, 4) * 3 + 5
    for momentum, refused in ((0.3, False), (None, True)):
        plain, norm = (nn.Sequential(kind(4, momentum=momentum)) for kind in (nn.BatchNorm1d, nn.SyncBatchNorm))
        sharded = compile_sharded(norm, sgd(norm), loss=lambda model, x: model(x).square().mean(), policy=EAGER)
        if refused:
            with pytest.raises(ValueError, match=r"momentum|num_batches_tracked"):
                sharded.step(x)
            continue
        for step in range(3):
            sharded.step(x + step)
            plain(x + step)
        for name, value in plain.named_buffers():
            torch.testing.assert_close(norm.get_buffer(name), value)
