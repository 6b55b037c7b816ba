"""Which optimizers may update whole parameters, each on its owner: that is tried before it is believed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.optim.ways import is_of_torch
from tests.whole_optimizers import Own


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


def test_only_pytorch_s_own_code_is_not_looked_at() -> None:
    class Mine(optim.Muon):
        pass

    parameters = [nn.Parameter(torch.randn(3, 2))]
    muon, *others = (kind(parameters) for kind in (optim.Muon, optim.Adafactor, optim.AdamW))
    assert is_of_torch(muon) and all(map(is_of_torch, others))
    assert not is_of_torch(Mine(parameters)) and not is_of_torch(Own(parameters))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim.Muon, "step", Own.step)
        assert not is_of_torch(muon)
