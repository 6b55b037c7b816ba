"""What a trace took for granted is asked at every call: each thing changed, against eager PyTorch in the same test."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, Sharded, compile_sharded
from tests.launch import launch
from tests.parts import parts

EAGER = Policy(lower="eager")
SCALE = 2.0
WEIGHTS = torch.tensor([1.0, 2.0])


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """Reads one of everything that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Part(), nn.Linear(6, 2)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.0)
        self.temp, self.options, self.sizes = 1.0, {"a": 1.0}, [1.0, 2.0]
        self.act = doubled
        self.mask = torch.ones(6)
        self.tensors = {"shift": torch.zeros(2)}
        self.teacher = [nn.Linear(6, 2).requires_grad_(False)]
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.norm(self.part(x) * self.mask)) * self.temp * SCALE
        y = self.act(y) * self.options["a"] * sum(self.sizes)
        return self.head(y) * WEIGHTS + self.offset + self.tensors["shift"] + self.teacher[0](x)


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 2, generator=generator)


def pair(make: Callable[[], nn.Module] = Net, loss: Callable[..., Any] = mse) -> tuple[Sharded, Callable[[], Any]]:
    """A sharded model, and a step of the plain one, which is its `model`."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.01), loss=loss, policy=EAGER)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(plain, *batch())
        value.backward()
        optimizer.step()
        return value.detach()

    step.model = plain  # type: ignore[attr-defined]
    return sharded, step


def use(value: Any, name: str) -> None:
    globals()[name] = value


def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def other_forward(self: Part, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(self.inner(x))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda m: setattr(m, "temp", 3.0), "model.temp == 1.0, which is 3.0 now"),
    "dropout": (lambda m: setattr(m.drop, "p", 1.0), "model.drop.p == 0.0, which is 1.0 now"),
    "dictionary": (lambda m: m.options.__setitem__("a", 3.0), "model.options['a'] == 1.0, which is 3.0 now"),
    "list": (lambda m: m.sizes.append(3.0), "model.sizes"),
    "list entry": (lambda m: m.sizes.__setitem__(0, 3.0), "model.sizes[0] == 1.0, which is 3.0 now"),
    "function": (lambda m: setattr(m, "act", torch.sin), "model.act"),
    "eval of a part": (lambda m: m.norm.eval(), "model.norm.training"),
    "replaced module": (lambda m: setattr(m, "drop", nn.Tanh()), "model.drop"),
    "hook": (lambda m: m.part.inner.register_forward_hook(hook), "model.part.inner.forward_hooks"),
    "hook of the model": (lambda m: m.register_forward_hook(hook), "hooks"),
    "pre-hook of the model": (lambda m: m.register_forward_pre_hook(lambda _, x: (x[0] * 2,)), "hooks"),
    "forward of an instance": (lambda m: setattr(m.part, "forward", lambda x: x * 2), "model.part"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_seen(change: str, caplog: pytest.LogCaptureFixture) -> None:
    sharded, plain = pair()
    sharded.step(*batch())
    plain()
    sharded.step(*batch())
    before = plain()
    assert sharded.captures == 1
    make, said = CHANGES[change]
    make(sharded.model)
    make(plain.model)  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO, "fsdp_compiled"):
        values = [(sharded.step(*batch()), plain()) for _ in range(2)]
    for ours, theirs in values:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert sharded.captures == 2
    assert said in caplog.text
    assert not torch.allclose(values[0][1], before, rtol=1e-3)  # else the change changes nothing


GLOBALS: dict[str, tuple[str, Any, int]] = {
    "number": ("SCALE", 5.0, 2),
    "tensor": ("WEIGHTS", torch.tensor([3.0, 4.0]), 1),
    "tensor of another shape": ("WEIGHTS", torch.tensor([3.0]), 2),
}


@pytest.mark.parametrize("change", GLOBALS)
def test_globals_are_read_as_they_are_now(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value, captures = GLOBALS[change]
    sharded, plain = pair()
    for _ in range(2):
        torch.testing.assert_close(sharded.step(*batch()), plain())
    monkeypatch.setitem(globals(), name, value)
    for _ in range(2):
        torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == captures


def test_a_class_that_gets_another_forward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, plain = pair()
    torch.testing.assert_close(sharded.step(*batch()), plain())
    monkeypatch.setattr(Part, "forward", other_forward)
    torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == 2


# What a loss may ask of its batch.


def is_same(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * (3.0 if x is y else 1.0)


def test_one_tensor_given_twice_is_one() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=is_same, policy=EAGER)
    x = torch.randn(5, 6)
    for given in ((x, x), (x, x.clone()), (x, x)):
        value, gradients = sharded.value_and_grad(*given)
        theirs = is_same(plain, *given)
        torch.testing.assert_close(value, theirs.detach())
        (expected,) = torch.autograd.grad(theirs, [plain.weight])
        torch.testing.assert_close(gradients["weight"].view(2, 6), expected)
    assert sharded.captures == 2


def asks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * (3.0 if x.requires_grad else 1.0)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * (3.0 if x.requires_grad else 1.0)


def test_a_batch_that_requires_a_gradient_is_refused_where_it_would_be_lost() -> None:
    torch.manual_seed(0)
    model = Asks()
    plain = copy.deepcopy(model)
    sharded = compile_sharded(model, loss=asks, policy=EAGER)
    x = torch.randn(5, 6)
    torch.testing.assert_close(sharded.value_and_grad(x)[0], asks(plain, x).detach())
    with pytest.raises(ValueError, match=r"batch\[0\] requires a gradient.*detach"):
        sharded.value_and_grad(x.clone().requires_grad_())
    with torch.no_grad():
        for given in (x, x.clone().requires_grad_()):
            torch.testing.assert_close(sharded(given), plain(given))


# Tensors that are read as they are now.


def test_a_replaced_buffer_is_read_and_written_as_it_is_now() -> None:
    sharded, plain = pair()
    torch.testing.assert_close(sharded.step(*batch()), plain())
    for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
        model.offset = torch.tensor([1.0, 2.0])
        model.norm.running_mean = torch.full((6,), 0.5)
        model.norm.register_buffer("running_var", torch.full((6,), 2.0))
    for _ in range(2):
        torch.testing.assert_close(sharded.step(*batch()), plain())
    full = sharded.full_state_dict()
    for name, value in plain.model.named_buffers():  # type: ignore[attr-defined]
        torch.testing.assert_close(full[name], value)
    assert sharded.captures == 1
    for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
        model.offset = torch.tensor([3.0])
    torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == 2


def test_a_replaced_buffer_is_the_states_at_once() -> None:
    """Nothing is called between the replacement and the reading."""
    sharded, _ = pair()
    sharded.model.norm.running_mean = torch.full((6,), 0.5)  # type: ignore[union-attr]
    assert sharded.full_state_dict()["norm.running_mean"].tolist() == [0.5] * 6
    sharded.model.norm.running_mean = torch.full((6,), 0.25)  # type: ignore[union-attr]
    assert sharded.state.buffers["norm.running_mean"].tolist() == [0.25] * 6


TENSORS: dict[str, Callable[[Any], Any]] = {
    "a teacher's parameter": lambda m: setattr(
        m.teacher[0], "weight", nn.Parameter(torch.ones(2, 6), requires_grad=False)
    ),
    "a teacher": lambda m: m.teacher.__setitem__(0, nn.Linear(6, 2).requires_grad_(False)),
    "an attribute": lambda m: setattr(m, "mask", torch.arange(6.0)),
    "an entry": lambda m: m.tensors.__setitem__("shift", torch.ones(2)),
}


@pytest.mark.parametrize("change", TENSORS)
def test_closed_over_tensors_are_read_as_they_are_now(change: str) -> None:
    sharded, plain = pair()
    torch.testing.assert_close(sharded.step(*batch()), plain())
    for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
        torch.manual_seed(7)
        TENSORS[change](model)
    for _ in range(2):
        torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == 1


class Keeps(nn.Module):
    """Its attribute is state: forward reads and writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.h = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x) + self.h
        self.h = (0.5 * self.h + y.mean(0)).detach()
        return y


def test_state_that_forward_keeps_starts_anew_where_the_user_sets_it() -> None:
    sharded, plain = pair(Keeps)
    rows = (5, 5, 3, 5)  # another program, which writes the same state
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.01)  # type: ignore[attr-defined]
    for count, call in enumerate(rows):
        if count in (2, 3):
            for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
                model.h = torch.full((2,), float(count))
        x, y = (part[:call] for part in batch())
        optimizer.zero_grad()
        theirs = mse(plain.model, x, y)  # type: ignore[attr-defined]
        theirs.backward()
        optimizer.step()
        torch.testing.assert_close(sharded.step(x, y), theirs.detach())
    assert sharded.captures == 2


# What it costs, and what is kept.


def test_values_that_alternate_do_not_compile_again(caplog: pytest.LogCaptureFixture) -> None:
    sharded, plain = pair()
    for temp in (1.0, 0.5, 1.0, 0.5, 1.0):
        for model in (sharded.model, plain.model):  # type: ignore[attr-defined]
            model.temp = temp
        torch.testing.assert_close(sharded.step(*batch()), plain())
    assert sharded.captures == 2
    assert caplog.text.count("compiling step") == 1


def test_programs_that_values_ask_for_are_bounded() -> None:
    torch.manual_seed(0)
    model = Asks()
    model.temp = 0.0  # type: ignore[assignment]

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * model.temp

    with parts() as of:
        sharded = compile_sharded(model, loss=loss, policy=Policy(lower="eager", programs=2))
    for temp in (1.0, 2.0, 3.0):
        model.temp = temp  # type: ignore[assignment]
        sharded.value_and_grad(torch.ones(5, 6))
    assert sharded.captures == 3 and len(sharded.programs) == 2
    assert len({compiled.label for compiled in of(sharded).programs.cached}) == 2


def test_a_replaced_module_with_parameters_is_refused() -> None:
    sharded, _ = pair()
    sharded.step(*batch())
    sharded.model.head = nn.Linear(6, 2)
    with pytest.raises(ValueError, match=r"head\.weight was replaced after compile_sharded"):
        sharded.step(*batch())


def test_no_guard_looks_at_what_is_compared_anyway() -> None:
    """Tables of parameters, by `TakenModel`: their guards would be half of all."""
    with parts() as of:
        sharded, _ = pair()
    sharded.step(*batch())
    text = str(of(sharded).programs.newest.capture.guards._manager)
    assert "_modules['head']" in text and "_modules['head']._parameters" not in text
    assert ".teacher[0]._parameters" in text  # which is no part of the model


def test_no_modules_are_walked_to_find_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, _ = pair()
    sharded.step(*batch())

    def walked(*_: Any, **__: Any) -> Any:
        raise AssertionError("modules are walked")

    for name in ("modules", "named_modules", "parameters", "named_parameters", "buffers", "named_buffers"):
        monkeypatch.setattr(nn.Module, name, walked)
    sharded.step(*batch())
    with pytest.raises(AssertionError, match="walked"):  # the control
        sharded.step(*(part[:3] for part in batch()))


# Ranks.

DISAGREEMENTS = {
    "one_rank_new": "after model.temp changed",
    "one_rank_known": "after model.temp changed",
    "other_values": "The program differs between rank 0 and rank 1",
    "one_rank_hook": "after model.head.forward_hooks changed",
}


@pytest.fixture(scope="module")
def answers() -> Any:
    return launch(Path(__file__).parent / "workers" / "guards.py", 2, "all_alike", *DISAGREEMENTS)


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_what_one_rank_alone_changed_is_an_error_on_every_rank(answers: Any, case: str) -> None:
    for answer in answers[case]:
        assert answer.get("error") == "RankError", answer
        assert DISAGREEMENTS[case] in answer["message"]
        assert answer["notes"] == ["unchanged: True"]


def test_what_all_ranks_change_compiles_once_a_value(answers: Any) -> None:
    assert [answer["result"]["captures"] for answer in answers["all_alike"]] == [2, 2]


# What this package puts around a trace is no reason to trace again.

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 2))


def hooked() -> nn.Sequential:
    model = linear()
    model.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    return model


def compiled_part() -> nn.Sequential:
    model = linear()
    model[0] = torch.compile(model[0])  # type: ignore[assignment]
    return model


def synchronised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 2), nn.SyncBatchNorm(2))


@pytest.mark.parametrize(
    ("make", "precision"),
    [(linear, LOW), (hooked, None), (hooked, LOW), (compiled_part, None), (synchronised, None)],
)
def test_what_is_around_the_trace_alone_compiles_nothing_again(make: Any, precision: Any) -> None:
    policy = Policy(lower="eager", precision=precision) if precision else EAGER
    sharded = compile_sharded(make(), loss=mse, policy=policy)
    for _ in range(3):
        sharded.value_and_grad(*batch())
    assert sharded.captures == 1
