"""Tensors of a model that share memory: a write to one is a write to the other in eager PyTorch, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_compiled import CaptureError, Policy, compile_sharded, fully_shard
from tests.toys import squares

EAGER = Policy(lower="eager")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def tied_by_data() -> nn.Module:
    model = Two()
    model.b.weight.data = model.a.weight.data
    return model


def buffer_of_a_parameter() -> nn.Module:
    model = Two()
    model.register_buffer("row", model.a.weight.detach()[0])
    return model


def list_of_views() -> nn.Module:
    model = Two()
    model.views = [model.a.bias.detach()]  # type: ignore[assignment]
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "data": (tied_by_data, r"b\.weight and a\.weight are two parameters that share memory.*b\.weight = a\.weight"),
    "buffer": (buffer_of_a_parameter, r"row shares memory with the parameter a\.weight.*clone"),
    "attribute": (list_of_views, r"views\[0\] shares memory with the parameter a\.bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_shares_memory_with_a_parameter_is_refused(case: str) -> None:
    make, said = REFUSED[case]
    model = make()
    before = list(model.parameters())
    with pytest.raises(ValueError, match=said):
        compile_sharded(model, policy=EAGER)
    assert all(one is two for one, two in zip(before, model.parameters(), strict=True))  # nothing was changed


def tied() -> nn.Module:
    model = Two()
    model.b.weight = model.a.weight
    return model


def parts_of_one_storage() -> nn.Module:
    model, flat = Two(), torch.randn(3, 6)
    model.a.weight.data, model.b.weight.data = flat[:, :3], flat[:, 3:]
    return model


@pytest.mark.parametrize("make", [Two, tied, parts_of_one_storage])
def test_what_shares_nothing_is_trained(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    plain, x = copy.deepcopy(model), torch.randn(4, 3)
    sharded = compile_sharded(model, loss=lambda model, x: model(x).square().mean(), policy=EAGER)
    torch.testing.assert_close(sharded.value_and_grad(x)[0], plain(x).square().mean().detach())


class Overlapping(nn.Module):
    """Two buffers in one memory."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.head, self.writes = nn.Linear(3, 3), writes
        both = torch.ones(4)
        self.register_buffer("all", both)
        self.register_buffer("part", both[:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.all.mul_(2)
        return self.head(x) * self.part


def test_buffers_in_one_memory_are_read_and_not_written() -> None:
    torch.manual_seed(0)
    model, x = Overlapping(writes=False), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=squares, policy=EAGER)
    torch.testing.assert_close(sharded.value_and_grad(x)[0], squares(plain, x).detach())
    with pytest.raises(CaptureError, match="Forward writes to all, which shares memory with part"):
        compile_sharded(Overlapping(writes=True), loss=squares, policy=EAGER).value_and_grad(x)


class Counts(nn.Module):
    """Writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(4, 3))
        self.register_buffer("other", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.head(x + self.seen) * self.other


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("face", ["compile_sharded", "fully_shard"])
def test_what_comes_to_share_memory_with_a_written_buffer_is_refused(face: str, first: bool) -> None:
    """A tensor of the batch, at the first call or a later one, and another buffer that is replaced."""
    model = Counts()
    call = fully_shard(model) if face == "fully_shard" else compile_sharded(model, loss=squares, policy=EAGER)
    run = call if face == "fully_shard" else call.value_and_grad
    if not first:
        run(torch.randn(4, 3))
    before = model.seen.clone()
    for given in (model.seen, model.seen.view(-1)[:12].view(4, 3)):
        with pytest.raises(
            CaptureError, match="Forward writes to seen, which shares memory with a tensor of the batch"
        ):
            run(given)
    assert torch.equal(model.seen, before)
    run(model.seen.clone())
    model.other = model.seen[0]
    for _ in range(2):
        with pytest.raises(CaptureError, match="Forward writes to seen, which shares memory with other"):
            run(torch.randn(4, 3))


def test_a_weight_that_a_hook_computes_in_each_forward_is_no_copy() -> None:
    """`torch.nn.utils.spectral_norm` leaves one beside the parameter, in its memory."""
    torch.manual_seed(0)
    model, plain = (nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Tanh()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(plain.parameters(), 0.1)
    sharded = compile_sharded(model, torch.optim.AdamW(model.parameters(), 0.1), loss=squares, policy=EAGER)
    for _ in range(3):
        x = torch.randn(4, 3)
        loss = squares(plain, x)
        assert torch.equal(sharded.step(x), loss.detach())
        theirs.zero_grad()
        loss.backward()
        theirs.step()
