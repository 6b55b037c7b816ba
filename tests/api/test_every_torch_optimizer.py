"""Every class of ``torch.optim`` with each of its options: eager PyTorch's steps, or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import fx, nn, optim

from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.optim.trial import initial

WHOLE = ("Adafactor", "Muon")  # mix elements of a parameter
REFUSED = ("LBFGS", "SparseAdam")  # need a closure or sparse gradients
RATES = (0.02, 0.05, 0.01, 0.0, 0.03, 0.02, 0.01)  # RAdam begins to rectify at step 6
CLASSES = sorted(
    (kind for kind in vars(optim).values() if inspect.isclass(kind) and issubclass(kind, optim.Optimizer)),
    key=lambda kind: kind.__name__,
)
# What an option is set to, besides its default; those that only choose an implementation are of no meaning here.
VALUES: dict[str, tuple[Any, ...]] = {
    "alpha": (0.5,), "amsgrad": (True,), "betas": ((0.5, 0.8),), "centered": (True,), "dampening": (0.3,),
    "decoupled_weight_decay": (True,), "eps": (1e-2,), "etas": ((0.4, 1.5),), "initial_accumulator_value": (0.5,),
    "lambd": (0.1,), "lr_decay": (0.2,), "maximize": (True,), "momentum": (0.8,), "momentum_decay": (0.1,),
    "nesterov": (True,), "rho": (0.5,), "step_sizes": ((1e-2, 0.03),), "t0": (2,), "weight_decay": (0.3,),
}  # fmt: skip
# What else must be set for an option to tell.
TOGETHER: dict[str, dict[str, Any]] = {
    "alpha": {"lambd": 1.0}, "dampening": {"momentum": 0.9}, "decoupled_weight_decay": {"weight_decay": 0.1},
    "nesterov": {"momentum": 0.9},
}  # fmt: skip
SILENT = ("t0",)  # of ASGD: only its average of the parameters knows it
HALVES = [optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad]


def _options(kind: type[optim.Optimizer]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each option, by name, with what goes with it, and that alone."""
    known = inspect.signature(kind.__init__).parameters
    found = []
    for name in filter(VALUES.__contains__, known):
        others = {other: value for other, value in TOGETHER.get(name, {}).items() if other in known}
        found += [(name, {name: value, **others}, others) for value in VALUES[name]]
    return found


def _both(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, *, follow: bool = True, rule: bool = True
) -> list[torch.Tensor]:
    """The same steps by the traced rule and by the class itself. ``follow``: whether the rule gets the rates."""
    torch.manual_seed(0)
    mine, parameter = (lambda value: (value.clone(), nn.Parameter(value)))(torch.randn(32, 16).to(dtype))
    eager = kind([parameter], **{"lr": RATES[0], **options}, foreach=False)
    gradients = [torch.randn(32, 16).to(dtype) for _ in RATES]
    for rate, gradient in zip(RATES, gradients, strict=True):
        parameter.grad = gradient.clone()
        eager.param_groups[0]["lr"] = rate
        eager.step()
    (found,) = make_rules(kind([nn.Parameter(mine.clone())], **{"lr": RATES[0], **options})) if rule else (None,)
    if found is not None:
        mine = mine.reshape(-1)
        state = [initial(entry, mine) for entry in found.state]
        update = fx.GraphModule(nn.Module(), found.trace(dtype, mine.device))
        for rate, gradient in zip(RATES, gradients, strict=True):
            hypers = [torch.tensor(rate if follow else RATES[0], dtype=torch.float64) for _ in found.hypers]
            with torch.no_grad():
                update(mine, gradient.reshape(-1).clone(), *state, *hypers)
    return [mine, parameter.detach().reshape(-1)]


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not optim.Optimizer], ids=lambda k: k.__name__)
def test_each_option_is_as_in_eager_pytorch(kind: type[optim.Optimizer]) -> None:
    if kind.__name__ in WHOLE:
        assert make_rules(kind([nn.Parameter(torch.randn(4, 4))]))[0].whole  # type: ignore[call-arg]
        return
    if kind.__name__ in REFUSED:
        with pytest.raises(ValueError, match=f"{kind.__name__} is not supported"):
            make_rules(kind([nn.Parameter(torch.randn(4, 4))]))  # type: ignore[call-arg]
        return
    for name, options, others in [("", {}, {}), *_options(kind)]:
        mine, theirs = _both(kind, options, torch.float32)
        torch.testing.assert_close(
            mine, theirs, rtol=2e-6, atol=2e-7, msg=lambda text, options=options: f"{options}: {text}"
        )
        if name and name not in SILENT:  # control: the option tells
            plain = _both(kind, others, torch.float32, rule=False)[1]
            assert not torch.allclose(theirs, plain, rtol=1e-5, atol=1e-6), options
    if kind is not optim.Rprop:  # control; Rprop reads the rate only at its start
        mine, theirs = _both(kind, {}, torch.float32, follow=False)
        assert not torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.__name__)
def test_in_half_precision(kind: type[optim.Optimizer], dtype: torch.dtype) -> None:
    for options in ({"eps": 1e-4}, {"eps": 1e-4, "weight_decay": 0.1}):
        mine, theirs = _both(kind, options, dtype)
        assert torch.equal(mine, theirs), (options, float((mine - theirs).abs().max()))
    mine, theirs = _both(kind, {"eps": 1e-4}, dtype, follow=False)
    assert not torch.equal(mine, theirs)
