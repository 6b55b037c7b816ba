"""accumulate, then step: one step on the joined batch, however many microbatches, with no recompile."""

from __future__ import annotations

import copy

import pytest
import torch

from fsdp_compiled import Policy, compile_sharded
from tests.toys import Net, batches, build, mse, sgd


def _train(model: Net, policy: Policy, rows: list[int]) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Steps of as many microbatches as each of ``rows`` says, three rows each."""
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=policy)
    losses = []
    stream = iter(batches(sum(rows), rows=3))
    for count in rows:
        for _ in range(count - 1):
            sharded.accumulate(*next(stream))
        losses.append(sharded.step(*next(stream)).item())
    return sharded.full_state_dict(), losses, sharded.captures


@pytest.mark.parametrize("accumulate", ["shards", "full"])
def test_microbatches_are_one_step_on_the_joined_batch(accumulate: str) -> None:
    rows = [3, 2, 4, 2]
    model = build()
    plain, wrong = copy.deepcopy(model), copy.deepcopy(model)
    found, losses, captures = _train(model, Policy(lower="eager", accumulate=accumulate), rows)
    for reference, extra in ((plain, 1), (wrong, 2)):
        optimizer = sgd(reference)
        stream = iter(batches(sum(rows), rows=3))
        for index, count in enumerate(rows):
            parts = [next(stream) for _ in range(count)]
            x, y = (torch.cat(tensors) for tensors in zip(*parts))
            optimizer.zero_grad()
            loss = mse(reference, x, y)
            (loss * extra).backward()
            optimizer.step()
            if reference is plain:
                assert loss.item() == pytest.approx(losses[index], rel=1e-6)
    for name, value in plain.state_dict().items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm() + 1e-8
    assert not all(torch.allclose(found[name], value, rtol=1e-5) for name, value in wrong.state_dict().items())
    assert captures == 2  # one microbatch, one last


def test_a_step_after_the_row_starts_from_nothing() -> None:
    model = build()
    plain = copy.deepcopy(model)
    found, _, captures = _train(model, Policy(lower="eager"), [2, 1, 1])
    optimizer = sgd(plain)
    stream = batches(4, rows=3)
    for parts in (stream[:2], stream[2:3], stream[3:]):
        optimizer.zero_grad()
        for x, y in parts:
            (mse(plain, x, y) / len(parts)).backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm()
    assert captures == 2


def test_nothing_is_held_before_the_first_microbatch() -> None:
    model = build()
    sharded = compile_sharded(model, sgd(model), loss=mse, policy=Policy(lower="eager"))
    sharded.step(*batches(1)[0])
    assert sharded.state.sums == {}
    loss = sharded.accumulate(*batches(1)[0])
    assert loss.dim() == 0
    held = {name: tensor.numel() for name, tensor in sharded.state.sums.items() if tensor.dim()}
    assert held == {buffer.key: buffer.numel for buffer in sharded.plan.buffers}


def test_accumulate_needs_an_optimizer() -> None:
    sharded = compile_sharded(build(), loss=mse, policy=Policy(lower="eager"))
    with pytest.raises(RuntimeError, match="accumulate needs an optimizer"):
        sharded.accumulate(*batches(1)[0])
