"""A loss whose logits are never whole: eager PyTorch's loss and gradients, in a fraction of its memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_compiled import Policy, chunked_cross_entropy, compile_sharded, fully_shard
from tests.allocator import record
from tests.chosen import needs_torch
from tests.launch import launch
from tests.workers.chunked_loss import Head, cut, data, plain, uncut

EAGER = Policy(lower="eager")
VOCABULARY = 131_072


def _both(rows: int, dtype: torch.dtype = torch.float32, bias: bool = True, **options: Any) -> list[list[torch.Tensor]]:
    """Loss and gradients, uncut and cut."""
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=dtype) for shape in ((2, 13, 5), (31, 5), (31,))]
    targets = torch.randint(31, (2, 13))
    targets[0, 3:9] = -100
    found = []
    for chunked in (False, True):
        hidden, weight, add = (value.clone().requires_grad_() for value in values)
        added = add if bias else None
        if chunked:
            loss = chunked_cross_entropy(hidden, weight, targets, added, rows=rows, **options)
        else:
            logits = F.linear(hidden, weight, added).flatten(0, 1).to(torch.promote_types(dtype, torch.float32))
            loss = F.cross_entropy(logits, targets.flatten(), **options)
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in (hidden, weight, add) if one.grad is not None)])
    return found


@pytest.mark.parametrize("rows", [1, 4, 26, 1000])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_loss_and_gradients_are_those_of_the_uncut_loss(rows: int, options: dict[str, Any]) -> None:
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)):
        for bias in (True, False):
            theirs, mine = _both(rows, dtype, bias, **options)
            assert len(theirs) == 3 + bias
            for one, other in zip(theirs, mine, strict=True):
                assert one.dtype == other.dtype and one.shape == other.shape
                assert float((one - other).abs().max()) <= bound * float(one.abs().max())


def test_a_loss_that_is_cut_wrongly_would_be_seen() -> None:
    """The control: the mean of slices' means is another number where slices have other numbers of targets."""
    theirs, _ = _both(4)
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape) for shape in ((2, 13, 5), (31, 5), (31,)))
    targets = torch.randint(31, (2, 13))
    targets[0, 3:9] = -100
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    means = [
        F.cross_entropy(one, other) for one, other in zip(logits.split(13), targets.flatten().split(13), strict=True)
    ]
    assert abs(torch.stack(means).mean() - theirs[0]) > 1e-3


def test_where_every_target_is_ignored_it_is_nan_as_in_pytorch() -> None:
    assert chunked_cross_entropy(torch.ones(3, 2), torch.ones(4, 2), torch.full((3,), -100)).isnan()


def test_what_does_not_fit_is_refused_by_name() -> None:
    hidden, weight, targets = torch.ones(3, 2), torch.ones(4, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"targets have the shape \[2\]; expected .* \[3\]"):
        chunked_cross_entropy(hidden, weight, targets[:2])
    with pytest.raises(ValueError, match=r"weight has the shape \[2, 4\]; expected \[vocabulary, 2\]"):
        chunked_cross_entropy(hidden, weight.t(), targets)
    with pytest.raises(ValueError, match="rows is 0"):
        chunked_cross_entropy(hidden, weight, targets, rows=0)
    with pytest.raises(ValueError, match=r"targets are torch.float32; expected classes"):
        chunked_cross_entropy(hidden, weight, torch.ones(3))


def test_a_step_holds_a_slice_of_the_logits() -> None:
    """Predicted and measured, with a vocabulary of 128k; 256 rows of 64 at a time."""
    batch = data(256, VOCABULARY)
    peaks, weights = [], []
    for loss in (uncut, partial(cut, rows=64)):
        model = Head(VOCABULARY, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER)
        sharded.step(*batch)
        with record() as recording:
            sharded.step(*batch)
        peaks.append((sharded.memory.peak.nbytes - sharded.memory.persistent.total, recording.peak))
        weights.append(sharded.full_state_dict())
        whole = [node for node in sharded.program.graph.nodes if _numel(node) >= 256 * VOCABULARY]
        assert bool(whole) == (loss is uncut)
    (predicted, measured), (less, measured_less) = peaks
    logits = 4 * 256 * VOCABULARY
    assert predicted > 2 * logits and measured > 1.9 * logits
    assert less < 0.45 * predicted and measured_less < 0.45 * measured
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-6, atol=1e-6)


def _numel(node: Any) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def test_in_the_loop_of_ones_own() -> None:
    """`fully_shard`: the loss is computed in the model's forward, and backward makes the logits again."""
    peaks = []
    for rows in (None, 64):
        model = plain(VOCABULARY, 8, rows)
        fully_shard(model, policy=EAGER)
        for _ in range(2):
            with record() as recording:
                model(*data(256, VOCABULARY)).backward()
        peaks.append(recording.peak)
    assert peaks[1] < 0.45 * peaks[0]
    weights = []
    for chunked in (False, True):
        model = plain(64, 8, 16 if chunked else None)
        if chunked:
            fully_shard(model, policy=EAGER)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(*data(100, 64)).backward()
            optimizer.step()
        weights.append([getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"was given a DTensor, .* call it in the model's forward"):
        chunked_cross_entropy(torch.ones(4, 8), model.head.weight, torch.zeros(4, dtype=torch.int64))


def test_on_two_ranks() -> None:
    """Both faces, with another number of targets that count in each slice."""
    found = launch(Path(__file__).parents[1] / "workers" / "chunked_loss.py", 2)
    cut = found.pop("a head that is cut")
    assert not any(found.values()), json.dumps(found, indent=1)
    needs_torch((2, 12), "its Dynamo does not say what an exception says")
    assert not cut


def test_the_head_may_be_tied_to_the_embedding() -> None:
    weights = []
    for loss in (uncut, partial(cut, rows=16)):
        model = Head(64, 8)
        model.head.weight = model.embed.weight
        sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=1.0), loss=loss, policy=EAGER)
        for _ in range(3):
            sharded.step(*data(100, 64))
        weights.append(sharded.full_state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-6, atol=1e-6)
