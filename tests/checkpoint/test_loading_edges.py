"""Loads of what does not quite fit: none of it is taken in another sense, nothing is changed before that is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_compiled import Policy, Sharded, compile_sharded

EAGER = Policy(lower="eager")


def counting(size: int, seed: int = 0) -> tuple[Sharded, torch.Tensor]:
    """With a tensor of the loss's own, of this size, that counts its calls."""
    torch.manual_seed(seed)
    model, calls = nn.Linear(4, 4), torch.zeros(size)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.add_(1)
        return model(x).square().mean() + 0 * calls.sum()

    return compile_sharded(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, policy=EAGER), calls


@pytest.mark.parametrize(("there", "here"), [(3, 1), (1, 3)])
def test_a_tensor_of_the_losses_own_with_another_shape_is_refused(tmp_path: Path, there: int, here: int) -> None:
    first, _ = counting(there)
    first.step(torch.ones(2, 4))
    first.step(torch.ones(2, 4))
    first.save(tmp_path, wait=True)
    second, calls = counting(here, seed=1)
    second.step(torch.ones(2, 4))
    before = [tensor.clone() for tensor in tree_leaves(second.state)]
    with pytest.raises(ValueError, match=rf"the loss updates is float32\[{here}\] here, and float32\[{there}\] in the"):
        second.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, tree_leaves(second.state), strict=True))
    assert second.load(tmp_path, strict=False) == 2
    assert calls.tolist() == [1.0] * here
    assert torch.equal(second.full_state_dict()["weight"], first.full_state_dict()["weight"])


class Turned(nn.Module):
    """A weight whose dims lie the other way round in memory: a parameter, or a buffer with rows in a row."""

    def __init__(self, parameter: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        if parameter:
            self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        else:
            self.register_buffer("turned", torch.zeros(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.turned


def test_a_parameter_that_has_become_a_buffer_is_not_turned(tmp_path: Path) -> None:
    first, second = (
        compile_sharded(
            model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, x: m(x).square().mean(), policy=EAGER
        )
        for model in (Turned(True), Turned(False))
    )
    first.save(tmp_path, step=1, wait=True)
    assert second.load(tmp_path, strict=False) == 1
    assert torch.equal(second.full_state_dict()["turned"], torch.arange(6.0).view(2, 3).t())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_weights_that_differ_are_not_taken_for_one_tied_parameter(tmp_path: Path) -> None:
    model = Tied()
    sharded = compile_sharded(model, loss=lambda m, x: m(x).mean(), policy=EAGER)
    sharded.export(tmp_path / "exported")
    file = tmp_path / "exported" / "model.safetensors"
    given = load_file(file)
    save_file({name: value + 1 for name, value in given.items()}, file)
    sharded.import_weights(file.parent)
    expected = sharded.full_state_dict()["head.weight"]
    assert torch.equal(expected, given["head.weight"] + 1)
    save_file({"embed.weight": expected + 1, "head.weight": expected + 2}, file)
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"differ in embed.weight and head.weight, which are one parameter here"):
            sharded.import_weights(file.parent, strict=strict)
    data = bytearray(file.read_bytes())
    data[20] = 255
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{file.name} is no safetensors file, or damaged"):
        sharded.import_weights(file.parent)
    assert torch.equal(sharded.full_state_dict()["head.weight"], expected)


def test_rates_of_other_groups_are_not_taken() -> None:
    """By ``load_state_dict``, for `torch.distributed.checkpoint`: a rate goes with the parameters."""
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    sharded = compile_sharded(model, torch.optim.SGD(groups), loss=lambda m, x: m(x).mean(), policy=EAGER)
    given = sharded.state_dict()
    first, second = given["optim"]["param_groups"]
    for changed, expected in (
        ([first], "the checkpoint has no optimizer's state of bias"),
        ([{**first, "params": ["other"]}, second], "the checkpoint has no optimizer's state of weight"),
    ):
        with pytest.raises(ValueError, match=expected):
            sharded.load_state_dict({**given, "optim": {**given["optim"], "param_groups": changed}})
    assert [group["lr"] for group in sharded.optimizer.param_groups] == [0.1, 0.2]
    second["lr"] = 0.3
    sharded.load_state_dict({**given, "optim": {**given["optim"], "param_groups": [second, first]}})
    assert [group["lr"] for group in sharded.optimizer.param_groups] == [0.1, 0.3]
