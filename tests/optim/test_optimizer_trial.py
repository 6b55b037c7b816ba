"""Optimizers that people write themselves: trained as eager PyTorch trains them, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.optim import ways
from fsdp_compiled.optim.rules import make_rules
from tests.own_optimizer import Own
from tests.toys import squares

EAGER = Policy(lower="eager", shard="zero1")


class GroupCounter(Own):
    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"] / group["step"])


class AttributeCounter(Own):
    def begin(self, group: dict[str, Any]) -> None:
        self.count += 1

    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"] / self.count**0.5)


class Rebound(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        state["m"] = state["m"].mul(0.9).add(g) if "m" in state else g.clone()
        p.add_(state["m"], alpha=-group["lr"])


class ByDim(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        if p.dim() > 1:
            p.mul_(1 - 0.3 * group["lr"])
        p.add_(g, alpha=-group["lr"])


class Decays(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.mul_(1 - 0.3 * group["lr"])
        p.add_(g, alpha=-group["lr"])


class ByFanIn(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"] / (p.shape[-1] if p.dim() > 1 else 1))


class ComparesRate(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        if group["lr"] > 0.05:
            g = g.sign()
        p.add_(g, alpha=-group["lr"])


class BothWays(Own):
    """Two branches that write different tensors, and one that only chooses a number."""

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1

    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        if "v" not in state:
            state["v"] = torch.zeros_like(p)
        warm = group["k"] / 4 if group["k"] < 4 else 1.0
        if group["k"] % 2 == 1:
            state["v"].add_(g * g)
        else:
            p.addcdiv_(g, state["v"].sqrt().add_(1e-3), value=-group["lr"] * warm)


class FromParameter(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        if not state:
            state["z"] = p.clone()
        state["z"].sub_(g, alpha=group["lr"])
        p.lerp_(end=state["z"], weight=0.5)


class ThroughData(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        g.data.add_(p.data, alpha=0.1)
        p.data.add_(g, alpha=-group["lr"])


class Late(Own):
    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"] * max(0.1, 1 - group["step"] / 3))


class CatchesZero(Own):
    def begin(self, group: dict[str, Any]) -> None:
        group["sum"] = group.get("sum", 0.0) + group["lr"]
        try:
            self.weight = group["lr"] / group["sum"]
        except ZeroDivisionError:
            self.weight = 0.0

    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=0.1 * (1 + self.weight))


class DividesByRate(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=0.01 / group["lr"])


class Norm(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.sub_(g / g.norm(), alpha=group["lr"])


class Noise(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.sub_(g + torch.randn_like(g), alpha=group["lr"])


class History(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates: list[float] = []

    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        self.rates.append(group["lr"])
        p.sub_(g, alpha=sum(self.rates))


class Rows(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        p.sub_(g - g.flip(0), alpha=group["lr"])


class KeepsList(Own):
    def update(self, p: Any, g: Any, state: Any, group: dict[str, Any]) -> None:
        state.setdefault("all", []).append(g.clone())
        p.sub_(state["all"][0], alpha=group["lr"])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _rate(step: int) -> float:
    return (0.0, 1.0, 0.4, 0.0, 2.0, 0.5, 0.3)[step % 7]


def trained(build: Callable[[Any], optim.Optimizer], steps: int = 7) -> tuple[Any, Any, Any]:
    """Weights by eager PyTorch, by us, and the `Sharded`, after as many steps with a rate that starts at zero."""
    torch.manual_seed(1)
    batches = [torch.randn(4, 6) for _ in range(steps)]
    eager = _model()
    optimizer = build(eager.parameters())
    schedule = optim.lr_scheduler.LambdaLR(optimizer, _rate)
    for batch in batches:
        optimizer.zero_grad()
        squares(eager, batch).backward()
        optimizer.step()
        schedule.step()
    model = _model()
    optimizer = build(model.parameters())
    sharded = compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, _rate)
    for batch in batches:
        sharded.step(batch)
        schedule.step()
    return eager.state_dict(), sharded.full_state_dict(), sharded


@pytest.mark.parametrize(
    "kind",
    [
        GroupCounter, AttributeCounter, Rebound, ByDim, ByFanIn, ComparesRate, BothWays, FromParameter, ThroughData,
        Late, CatchesZero,
    ],
)  # fmt: skip
def test_what_an_optimizers_code_may_do(kind: type[Own]) -> None:
    theirs, ours, sharded = trained(kind)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)
    assert sharded.captures == 1  # a rate that starts at zero, a counter and a branch compile nothing again


def test_a_rate_at_which_the_optimizers_own_code_fails_is_an_error() -> None:
    model = _model()
    optimizer = DividesByRate(model.parameters())
    sharded = compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    sharded.step(torch.ones(4, 6))
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ValueError, match="DividesByRate divides by zero at a rate of 0"):
        sharded.step(torch.ones(4, 6))


def test_a_hyperparameter_that_changes_traces_again() -> None:
    model = _model()
    optimizer = GroupCounter(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["weight"] = 1.0
    sharded = compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    sharded.step(torch.ones(4, 6))
    optimizer.param_groups[0]["weight"] = 0.5
    sharded.step(torch.ones(4, 6))
    assert sharded.state.optimizer["group 0.step"] == 2


def test_code_that_asks_for_shapes_gets_whole_parameters() -> None:
    for kind in (ByDim, ByFanIn):
        (rule,) = make_rules(kind([nn.Parameter(torch.ones(2, 3))]))
        assert rule.whole and "its step asks for" in (rule.eagerly or "")
    (rule,) = make_rules(Decays([nn.Parameter(torch.ones(2, 3))]))
    assert not rule.whole and rule.eagerly == ways.OTHERS


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Noise, "randn_like"),
        (History, "depends on which"),  # as many rates as parameters
        (KeepsList, "its state still grows after"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(kind: type[Own], reason: str) -> None:
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{kind.__name__} is not supported: .*{reason}"):
        compile_sharded(model, kind(model.parameters()), loss=squares, policy=EAGER)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_update_that_differs_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial compares with the optimizer itself, so what tracing gets wrong is found, and steps on shards."""
    before = ways.trace

    def forgets_the_decay(*args: Any) -> Any:
        graph = before(*args)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul_.Tensor):
            graph.erase_node(node)
        return graph

    monkeypatch.setattr(ways, "trace", forgets_the_decay)
    monkeypatch.setattr(ways, "_FOUND", {})
    (rule,) = make_rules(optim.AdamW([nn.Parameter(torch.randn(3, 2))]))
    assert re.match(r"on flat shards it does not do .* at step \d+ \(lr .*\) an element", rule.eagerly or "")
    step = ways.step_on_shards
    monkeypatch.setattr(ways, "step_on_shards", lambda *given: [step(*given), step(*given)])
    assert make_rules(Decays([nn.Parameter(torch.randn(3, 2))]))[0].whole


@pytest.mark.parametrize("kind", [Norm, Rows])
def test_what_mixes_the_elements_of_a_parameter_gets_it_whole(kind: type[Own]) -> None:
    theirs, ours, sharded = trained(kind)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value)
    assert "updated whole: 4 parameters" in str(sharded.plan)


def test_the_users_optimizer_is_left_as_it_was() -> None:
    for kind in (GroupCounter, AttributeCounter, Rebound, BothWays):
        optimizer = kind([nn.Parameter(torch.ones(3))])
        make_rules(optimizer)
        assert optimizer.count == 0 and not optimizer.state
        assert set(optimizer.param_groups[0]) == {"params", "lr"}
        assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))


def test_step_hooks_are_refused_whenever_they_were_registered() -> None:
    def note(*_: Any) -> None: ...

    model = _model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    handle = optimizer.register_step_pre_hook(note)
    with pytest.raises(ValueError, match=r"note is registered as a step pre-hook of SGD.*before sharded\.step"):
        compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    handle.remove()
    sharded = compile_sharded(model, optimizer, loss=squares, policy=EAGER)
    sharded.step(torch.ones(4, 6))
    handle = register_optimizer_step_post_hook(note)
    try:
        with pytest.raises(ValueError, match="step post-hook of SGD"):
            sharded.step(torch.ones(4, 6))
    finally:
        handle.remove()
    sharded.step(torch.ones(4, 6))


def test_prepared_optimizers_are_unwrapped() -> None:
    """Stand-ins for accelerate's, which is an optimizer, and Fabric's, which only looks like one."""

    class AcceleratedOptimizer(optim.Optimizer):
        __module__ = "accelerate.optimizer"

        def __init__(self, inner: optim.Optimizer) -> None:
            self.optimizer = inner

    class _FabricOptimizer:
        __module__ = "lightning.fabric.wrappers"

        def __init__(self, inner: optim.Optimizer) -> None:
            self._optimizer = inner

    for wrapper in (AcceleratedOptimizer, _FabricOptimizer):
        model = _model()
        inner = optim.SGD(model.parameters(), lr=0.1)
        sharded = compile_sharded(model, wrapper(inner), loss=squares, policy=EAGER)  # type: ignore[arg-type]
        assert sharded.optimizer is inner
        sharded.step(torch.ones(4, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}])
def test_parameters_in_half_precision_round_as_in_eager_pytorch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()  # type: ignore[no-any-return]

    # Sizes that fill vectors: on a CPU the last few elements of a tensor may round in another way than the others.
    eager, model = nn.Linear(64, 32).to(dtype), nn.Linear(64, 32).to(dtype)
    model.load_state_dict(eager.state_dict())
    optimizer = optim.SGD(eager.parameters(), lr=0.1, **options)
    sharded = compile_sharded(model, optim.SGD(model.parameters(), lr=0.1, **options), loss=loss, policy=EAGER)
    for _ in range(5):
        batch = torch.randn(8, 64).to(dtype)
        optimizer.zero_grad()
        loss(eager, batch).backward()
        optimizer.step()
        sharded.step(batch)
    found = sharded.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in eager.state_dict().items())
