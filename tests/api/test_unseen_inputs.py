"""What a trace reads past the values of its inputs: numbers in closed-over tensors, the batch's own containers and
classes, hooks of all modules. Each beside eager PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, compile_sharded, fully_shard
from fsdp_compiled.capture import closure_values
from tests.chosen import needs_torch
from tests.toys import EAGER, batches, net, sgd

Loss = Callable[..., torch.Tensor]
COUNTS, RATES = (1, 2, 1, 3), (1.0, 2.0, 1.0, 3.0)
READERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], tuple[Any, ...]]] = {
    "a branch": (lambda out, t: out * (2 if t.item() > 1 else 1), COUNTS),
    "an index": (lambda out, t: out * [1, 2, 3, 4][t], COUNTS),
    "a text": (lambda out, t: out * {"1": 3}.get(f"{t.item()}", 1), COUNTS),
    "float()": (lambda out, t: out * float(t), RATES),
    "alpha": (lambda out, t: torch.add(out, out.detach(), alpha=t.item()), RATES),
    "a sum": (lambda out, t: out * sum([t]), RATES),
    "a factor": (lambda out, t: out * t.item(), RATES),
}


def _losses(loss: Loss, given: list[tuple[Any, ...]], ours: bool, before: Callable[[int], None]) -> list[float]:
    model = net()
    optimizer = sgd(model)
    sharded = compile_sharded(model, optimizer, loss=loss, policy=EAGER) if ours else None
    found = []
    for index, batch in enumerate(given):
        before(index)
        if sharded is not None:
            found.append(sharded.step(*batch).item())
        else:
            value = loss(model, *batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
    return found


def _read(name: str, ours: bool) -> list[float]:
    reader, values = READERS[name]
    number = torch.tensor(values[0], dtype=torch.int64 if values is COUNTS else torch.float64)
    return _losses(
        lambda model, x, y: F.mse_loss(reader(model(x), number), y),
        batches(4, width=4),
        ours,
        lambda index: number.fill_(values[index]) and None,
    )


@pytest.mark.parametrize("name", READERS)
def test_a_number_in_a_closed_over_tensor_is_read_as_it_is_now(name: str) -> None:
    if name == "an index":
        needs_torch((2, 12), "its Dynamo refuses a tensor as an index of a list")
    assert _read(name, ours=True) == pytest.approx(_read(name, ours=False), rel=1e-6)


def test_without_asking_again_the_number_is_that_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure_values.Numbers, "hold", lambda _: True)
    assert _read("a branch", ours=True) != pytest.approx(_read("a branch", ours=False), rel=1e-3)


def test_hooks_of_all_modules_are_called_for_the_users_modules_alone() -> None:
    def losses(ours: bool) -> list[float]:
        handles: list[Any] = []

        def hook(index: int) -> None:
            if index == 1:
                handles.append(nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 0.1))

        try:
            return _losses(lambda model, x, y: F.mse_loss(model(x), y), batches(3, width=4), ours, hook)
        finally:
            for handle in handles:
                handle.remove()

    assert losses(ours=True) == losses(ours=False)


def test_containers_of_the_batch_that_the_loss_changes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor], seen: list[Any]) -> torch.Tensor:
        target = batch.pop("y")
        seen.append(1)
        return F.mse_loss(model(batch["x"]), target)

    sharded = compile_sharded(net(), None, loss=loss, policy=EAGER)
    (x, y), (longer, target) = batches(1, width=4)[0], batches(1, rows=6, width=4)[0]
    batch = {"x": x, "y": y}
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        sharded.value_and_grad(batch, [])
        sharded.value_and_grad({"x": longer, "y": target}, [])
    told = [record.getMessage() for record in caplog.records if "of the batch" in record.getMessage()]
    assert len(told) == 1 and "[0], [1]" in told[0]
    assert list(batch) == ["x", "y"]


def test_containers_that_are_only_read_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, batch: dict[str, Any], **rest: Any) -> torch.Tensor:
        rest.pop("other")
        batch = dict(batch)
        return F.mse_loss(model(batch.pop("pair")[0]), batch.pop("y"))

    sharded = compile_sharded(net(), None, loss=loss, policy=EAGER)
    ((x, y),) = batches(1, width=4)
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        sharded.value_and_grad({"pair": [x, 2, None], "y": y}, other=1)
    assert not [record for record in caplog.records if "of the batch" in record.getMessage()]


@pytest.mark.filterwarnings("ignore")  # both are on their way out of PyTorch
@pytest.mark.parametrize("kind", ["nested", "quantized"])
def test_tensors_without_sizes_or_strides_are_refused_with_the_cure(kind: str) -> None:
    ((x, y),) = batches(1, width=4)
    sharded = compile_sharded(net(), None, loss=lambda model, x, y: F.mse_loss(model(x), y), policy=EAGER)
    odd = (
        torch.nested.nested_tensor([x[0], x[1]])
        if kind == "nested"
        else torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    )
    with pytest.raises(ValueError, match=f"holds a {kind} tensor"):
        sharded.value_and_grad(odd, y)


class Own(torch.Tensor):
    """A class whose operators could mean anything."""


def test_a_tensor_of_the_users_class_is_refused_by_both_faces() -> None:
    ((x, y),) = batches(1, width=4)
    sharded = compile_sharded(net(), None, loss=lambda model, x, y: F.mse_loss(model(x), y), policy=EAGER)
    with pytest.raises(ValueError, match=r"batch \[0\] is a Own.*as_subclass"):
        sharded.value_and_grad(x.as_subclass(Own), y)
    sharded.value_and_grad(nn.Parameter(x, requires_grad=False), y)
    model = net()
    fully_shard(model, policy=Policy(lower="eager"))
    with pytest.raises(ValueError, match=r"batch \[0\] is a Own"):
        model(x.as_subclass(Own))


def test_an_attribute_of_a_batch_tensor_is_refused_where_it_is_asked_for() -> None:
    """At the first call and later; without a reader it is nobody's business."""

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y) * getattr(x, "weight", 1.0)

    (x, y), (other, _) = batches(2, width=4)
    x.weight = 2.0  # type: ignore[attr-defined]
    read = compile_sharded(net(), None, loss=loss, policy=EAGER)
    unread = compile_sharded(net(), None, loss=lambda model, x, y: F.mse_loss(model(x), y), policy=EAGER)
    unread.value_and_grad(x, y)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"batch \[0\] has an attribute .*\(weight\)"):
            read.value_and_grad(x, y)
        read.value_and_grad(other, y)
