"""Every optimizer class of some packages, and whether it trains: a table, and steps beside the class itself.

python -m tests.third_party          writes docs/optimizers.txt again
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim.given_optimizer import unwrapped
from fsdp_compiled.optim.hyperparameters import hyper
from fsdp_compiled.optim.rule import Rule
from fsdp_compiled.optim.rules import make_rules
from fsdp_compiled.optim.trial import initial

PACKAGES = {
    "pytorch_optimizer": "pytorch_optimizer",
    "optimi": "torch-optimi",
    "lion_pytorch": "lion-pytorch",
    "schedulefree": "schedulefree",
}
TABLE = Path(__file__).parent.parent / "docs" / "optimizers.txt"
RATES = (0.01, 0.02, 0.005, 0.0, 0.01)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"weight_decay": 0.1})
MORE: dict[str, dict[str, Any]] = {"AdaShift": {"reduce_func": None}}  # options of one class alone


def classes(package: str) -> dict[str, type[Optimizer]]:
    """By name, in alphabetical order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(package)
    found = {n: v for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, Optimizer)}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _plainly(kind: Any, parameters: list[nn.Parameter], options: dict[str, Any]) -> Optimizer:
    return kind(parameters, **options)  # type: ignore[no-any-return]


def _around(kind: Any, parameters: list[nn.Parameter], options: dict[str, Any]) -> Optimizer:
    return kind(torch.optim.SGD(parameters, **options))  # type: ignore[no-any-return]


def _given(**more: Any) -> Callable[..., Optimizer]:
    return lambda kind, parameters, options: kind(parameters, **options, **more)


def _by_use(kind: Any, parameters: list[nn.Parameter], options: dict[str, Any]) -> Optimizer:
    """Matrices by Muon's formula, vectors by Adam's."""
    groups = [{"params": [p], "use_muon": p.dim() > 1} for p in parameters]
    return kind(groups, **options)  # type: ignore[no-any-return]


def _of_model(kind: Any, parameters: list[nn.Parameter], options: dict[str, Any]) -> Optimizer:
    return kind(_model(parameters), **options)  # type: ignore[no-any-return]


def _model(parameters: list[nn.Parameter]) -> nn.Module:
    model = nn.Module()
    model.weight, model.bias = parameters
    return model


def _sharpness_of_model(kind: Any, parameters: list[nn.Parameter], options: dict[str, Any]) -> Optimizer:
    return kind(_model(parameters), parameters, torch.optim.SGD, **options)  # type: ignore[no-any-return]


def _scheduled_sharpness(kind: Any, parameters: list[nn.Parameter], options: dict[str, Any]) -> Optimizer:
    class Constant:
        def step(self) -> float:
            return 0.1

    inner = torch.optim.SGD(parameters, **options)
    return kind(parameters, inner, _model(parameters), rho_scheduler=Constant())  # type: ignore[no-any-return]


# Classes of pytorch_optimizer that take something else than parameters and options.
MADE: dict[str, Callable[..., Optimizer]] = {
    **dict.fromkeys(("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"), _by_use),
    **dict.fromkeys(("AdaLOMO", "AdamMini", "LOMO"), _of_model),
    **dict.fromkeys(
        ("Lookahead", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC"), _around
    ),
    **dict.fromkeys(("FriendlySAM", "LookSAM", "SAM"), _given(base_optimizer=torch.optim.SGD)),
    "BSAM": _given(num_data=100),
    "Ranger21": _given(num_iterations=100),
    "WSAM": _sharpness_of_model,
    "GSAM": _scheduled_sharpness,
}  # fmt: skip


def build(kind: type[Optimizer], options: dict[str, Any]) -> Optimizer | str:
    """The optimizer over a matrix and a vector, ready to step; why not, if it takes something else."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(12))]  # of one size, so traced once
    options = {"lr": RATES[0], **options}
    if "triton" in inspect.signature(kind.__init__).parameters:  # their own choice fails where there is no GPU
        options["triton"] = False
    try:
        optimizer = MADE.get(kind.__name__, _plainly)(kind, parameters, options)
    except Exception as error:
        return f"cannot be made: {error}"
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


def verdict(kind: type[Optimizer], options: dict[str, Any]) -> str:
    """``"trained"``, or why not; fails where the rule does not do what the optimizer does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer, eager = build(kind, options), build(kind, options)
        if isinstance(optimizer, str) or isinstance(eager, str):
            return str(optimizer)
        try:
            rules = make_rules(unwrapped(optimizer))
        except ValueError as error:
            return "refused: " + str(error).split(": ", 1)[1].split(". An optimizer can be")[0].split(": at step")[
                0
            ].rstrip(".")
        if any(rule.eagerly is not None for rule in rules):
            _check_eager_steps(kind, rules, optimizer, eager)
            whole = any(rule.whole for rule in rules)
            return f"trained, as it is, {'on whole parameters, ' * whole}after the program"
        _check_steps(kind, rules, optimizer, eager)
    return "trained"


def _check_eager_steps(kind: type[Optimizer], rules: Sequence[Rule], optimizer: Optimizer, eager: Optimizer) -> None:
    """By `compile_sharded`, on a model whose gradients are the batch."""

    def loss(model: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (model.weight * weight).sum() + (model.bias * bias).sum()  # type: ignore[operator, no-any-return]

    draw = torch.Generator().manual_seed(1)
    theirs, mine = ([p for group in one.param_groups for p in group["params"]] for one in (eager, optimizer))
    model = _model(mine)
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager", shard="ddp"))
    for rate in RATES:
        if rate == 0 and any(rule.nonzero for rule in rules):
            continue
        for group in (*eager.param_groups, *optimizer.param_groups):
            group["lr"] = rate
        for parameter in theirs:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        sharded.step(*(parameter.grad for parameter in theirs))
        eager.step()
    for found, parameter in zip(sharded.full_state_dict().values(), theirs, strict=True):
        torch.testing.assert_close(
            found, parameter.detach(), rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda text: f"{kind.__name__}: {text}"
        )


def _check_steps(kind: type[Optimizer], rules: Sequence[Rule], optimizer: Optimizer, eager: Optimizer) -> None:
    draw = torch.Generator().manual_seed(1)
    shards = []
    (rule,) = rules
    for parameter in optimizer.param_groups[0]["params"]:
        flat = parameter.detach().clone().reshape(-1)
        update = fx.GraphModule(nn.Module(), rule.trace(flat.dtype, flat.device))
        shards.append((update, flat, [initial(entry, flat) for entry in rule.state]))
    for rate in RATES:
        eager.param_groups[0]["lr"] = rate
        hypers = {
            name: torch.tensor(hyper(eager.param_groups[0], name), dtype=torch.float64) for name in rules[0].hypers
        }
        gradients = [torch.randn(p.shape, generator=draw) for p in eager.param_groups[0]["params"]]
        for parameter, gradient in zip(eager.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = gradient.clone()
        if rate == 0 and rules[0].nonzero:
            continue
        eager.step()
        for (update, flat, state), gradient in zip(shards, gradients, strict=True):
            with torch.no_grad():
                update(flat, gradient.reshape(-1), *state, *hypers.values())
    for (_, flat, _), parameter in zip(shards, eager.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(
            flat,
            parameter.detach().reshape(-1),
            rtol=1e-5,
            atol=1e-6,
            equal_nan=True,
            msg=lambda text: f"{kind.__name__}: {text}",
        )


def rows(package: str, names: Sequence[str] | None = None, more: bool = True) -> Iterator[str]:
    """A line for each class, or for these; and ``more`` where an option changes the answer."""
    known = classes(package)
    for name in known if names is None else names:
        plain = verdict(known[name], OPTIONS[0])
        yield f"{name:<28}{plain}"
        for options in (*OPTIONS[1:], *([MORE[name]] if name in MORE else [])) if more else ():
            other = verdict(known[name], options)
            if other != plain and not other.startswith("cannot be made"):
                yield f"{'  ' + ', '.join(f'{k}={v}' for k, v in options.items()):<28}{other}"


def table() -> str:
    """All packages, each under its version."""
    lines = []
    for package, distribution in PACKAGES.items():
        lines += [f"{distribution} {importlib.metadata.version(distribution)}", "", *rows(package), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TABLE.write_text(table())
