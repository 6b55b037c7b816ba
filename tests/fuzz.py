"""Generated programs against plain PyTorch: models, losses, optimizers, modes, policies, and what a person does between
calls. Whatever a program does, it gives plain PyTorch's numbers, or an error by name: never other numbers in silence.

    python -m tests.fuzz --count 2000            as many programs, from --start on; prints what differs, and its seed
    python -m tests.fuzz --seed 17               one program, and what it is made of

A `Case` is made of its seed alone. It is run twice, call by call: by `Plain`, the loop that everybody writes, and by
`Ours`. Both are built from the same seed, and draw from PyTorch's generator at the same place. After each call results
and the generator are compared; at the end weights, buffers and the optimizer's rates. A case that fails is made
smaller, one thing at a time, while it still fails.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import CaptureError, Policy, RankError, compile_sharded

WIDTH, OUT = 6, 3
CLOSE = 1e-5  # relative to the largest element; sums in another order move the last bits
HALF = 2e-2  # the same, of what autocast rounds to bfloat16 on its way through a dozen layers
REFUSED = (ValueError, CaptureError, RankError)  # what an error by name is


# What models are made of: [rows, WIDTH] -> [rows, WIDTH].


class Factor(nn.Module):
    """Reads a Python number, which the user may change between calls, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.deep = 0.7, False
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.factor
        return torch.tanh(x) if self.deep else x


class Count(nn.Module):
    """Counts its training calls in a buffer, and reads it."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return x * self.scale / (1 + 0.1 * self.seen)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Checkpointed(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Island(nn.Module):
    """Computes in float32 whatever is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.size * torch.randn_like(x) if self.training else x


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.low = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.1 * self.low(x)


class Hooked(nn.Module):
    """A forward hook changes what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_hook(lambda module, inputs, output: output * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "gelu": nn.GELU,
    "factor": Factor,
    "count": Count,
    "tied": Tied,
    "residual": Residual,
    "checkpointed": Checkpointed,
    "island": Island,
    "noise": Noise,
    "frozen": Frozen,
    "hooked": Hooked,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}
RANDOM = ("dropout", "noise")


class Model(nn.Module):
    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[name]() for name in layers)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Losses:
    """The losses, with a tensor that they close over and a number that they read."""

    def __init__(self) -> None:
        self.weights = torch.linspace(0.5, 1.5, OUT)
        self.power = 2
        self.fails = False

    def mse(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.mse_loss(model(x).float(), y)

    def aux(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x).float()
        return F.smooth_l1_loss(out, y), {"out": out, "rows": len(x)}

    def weighted(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self.fails:
            raise KeyError("the user's own")
        return (self.weights * (model(x).float() - y).abs() ** self.power).mean()

    def penalty(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        squares = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        return F.mse_loss(model(x).float(), y) + 1e-2 * squares

    def classes(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(model(x).float(), y.argmax(1))

    def twice(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.mse_loss(model(x).float(), y) + 0.5 * F.mse_loss(model(x.flip(0)).float(), y)


LOSSES = ("mse", "aux", "weighted", "penalty", "classes", "twice")


class Counting(torch.optim.Optimizer):
    """Somebody's own: counts in its groups, binds its state anew, and leaves vectors alone with its decay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.01, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                last = state.get("last", torch.zeros_like(p))
                state["last"] = last.mul(0.9).add(p.grad, alpha=0.1)
                if p.dim() > 1:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["last"] / (1 - 0.9 ** group["step"]), alpha=-group["lr"])


class Nested(torch.optim.Optimizer):
    """Keeps momenta in a dictionary and a count in a list; reads its decay, in groups of their own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momenta"] = {beta: torch.zeros_like(p) for beta in (0.5, 0.9)}
                        state["count"] = [0]
                    self.update(p, state, group, group["lr"])

    def update(self, p: Any, state: Any, group: Any, rate: float) -> None:
        state["count"][0] += 1
        p.mul_(1 - rate * group["weight_decay"])
        for beta, momentum in state["momenta"].items():
            p.add_(momentum.mul_(beta).add_(p.grad, alpha=1 - beta), alpha=-rate / (1 - beta ** state["count"][0]))


class Untraced(Nested):
    """The same, with a number that leaves the trace: it runs as it is."""

    def update(self, p: Any, state: Any, group: Any, rate: float) -> None:
        super().update(p, state, group, float(rate))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 5e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "counting": lambda p: Counting(p, 1e-2),
}
# Drawn by every fifth seed in the place of another, so that the others are the cases that they were.
LATER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nested": lambda p: Nested(p, 1e-2),
    "untraced": lambda p: Untraced(p, 1e-2),
}
SCHEDULES: dict[str, Callable[[int], float]] = {
    "none": lambda step: 1.0,
    "warm-up from zero": lambda step: min(1.0, step / 3),
    "decay": lambda step: 0.8**step,
}
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"shard": "ddp"},
    {"shard": "zero1"},
    {"shard": "zero2", "accumulate": "full"},
    {"clip": 0.1},
    {"clip_value": 0.01},
    {"recompute": "unit"},
    {"recompute": "cheap"},
    {"accumulate": "full"},
    {"dynamic": True},
    {"kernels": True},
)
# What a person does between calls, and what calls there are; each with how often.
ACTIONS: dict[str, int] = {
    "step": 8,
    "microbatches": 2,
    "gradient": 2,
    "forward": 2,
    "evaluate": 2,
    "wrong batch": 1,
    "draw": 1,
    "reseed": 1,
    "rate": 1,
    "decay": 1,
    "attribute": 1,
    "branch": 1,
    "probability": 1,
    "rebind": 1,
    "write constant": 1,
    "power": 1,
    "write buffer": 1,
    "eval one": 1,
    "autocast step": 2,
    "failing loss": 1,
    "write weight": 1,
    "replace buffer": 1,
    "replace layer": 1,
    "add hook": 1,
    "float64 by default": 1,
    "inference mode": 1,
}


@dataclass(frozen=True)
class Case:
    seed: int
    layers: tuple[str, ...]
    loss: str
    optimizer: str
    groups: bool
    schedule: str
    policy: tuple[tuple[str, Any], ...]
    autocast: bool  # around every call
    rows: tuple[int, ...]  # of the calls, in turns
    actions: tuple[str, ...]


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    case = Case(
        seed,
        layers=tuple(rng.choice(list(LAYERS)) for _ in range(rng.randint(1, 3))),
        loss=rng.choice(LOSSES),
        optimizer=rng.choice(list(OPTIMIZERS)),
        groups=rng.random() < 0.3,
        schedule=rng.choice(list(SCHEDULES)),
        policy=tuple(rng.choice(POLICIES).items()),
        autocast=rng.random() < 0.15,
        rows=tuple(rng.choice((2, 3, 4, 5)) for _ in range(rng.randint(1, 2))),
        actions=tuple(rng.choices(list(ACTIONS), list(ACTIONS.values()), k=rng.randint(3, 6))),
    )
    return replace(case, optimizer=rng.choice(list(LATER))) if seed % 5 == 3 else case


class Side:
    """A model, its optimizer, its losses and what is done to them; the same on both sides."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.model = Model(case.layers)
        self.losses = Losses()
        self.optimizer = {**OPTIMIZERS, **LATER}[case.optimizer](self._parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, SCHEDULES[case.schedule])
        self.loss = getattr(self.losses, case.loss)

    def _parameters(self) -> Any:
        if not self.case.groups:
            return self.model.parameters()
        parameters = list(self.model.parameters())
        matrices = [p for p in parameters if p.dim() > 1]
        return [
            {"params": matrices},
            {"params": [p for p in parameters if p.dim() < 2], "lr": 2e-2, "weight_decay": 0.0},
        ]

    def batch(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.case.rows[call % len(self.case.rows)]
        generator = torch.Generator().manual_seed(1000 * self.case.seed + call)
        return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, OUT, generator=generator)

    def modules(self, kind: type[nn.Module]) -> Iterator[Any]:
        return (module for module in self.model.modules() if isinstance(module, kind))

    def act(self, action: str, call: int) -> Any:
        """Does it; what there is to compare of it."""
        batch = self.batch(call)
        autocast = self.case.autocast or action == "autocast step"
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            if action in ("step", "autocast step"):
                return self._step([batch])
            if action == "microbatches":
                return self._step([batch, self.batch(call + 100), batch])
            if action == "gradient":
                return self.gradient(batch)
            if action == "forward":
                return self.forward(batch[0])
            if action == "evaluate":
                self.model.eval()
                result = self.forward(batch[0])
                self.model.train()
                return result
        return getattr(self, action.replace(" ", "_"))(batch)

    def _step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        result = self.step(batches)
        self.schedule.step()
        return result

    def draw(self, _: Any) -> Any:
        return torch.rand(3)

    def reseed(self, batch: Any) -> None:
        torch.manual_seed(len(batch[0]))

    def rate(self, _: Any) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    def decay(self, _: Any) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.02

    def attribute(self, _: Any) -> None:
        for module in self.modules(Factor):
            module.factor += 0.3

    def branch(self, _: Any) -> None:
        for module in self.modules(Factor):
            module.deep = not module.deep

    def probability(self, _: Any) -> None:
        for module in self.modules(nn.Dropout):
            module.p = 0.6

    def rebind(self, _: Any) -> None:
        self.losses.weights = self.losses.weights * 2

    def write_constant(self, _: Any) -> None:
        self.losses.weights.mul_(0.5)

    def power(self, _: Any) -> None:
        self.losses.power = 3 - self.losses.power

    def write_buffer(self, _: Any) -> None:
        for module in self.modules(nn.BatchNorm1d):
            module.running_mean.add_(0.5)
        for module in self.modules(Count):
            module.seen.zero_()

    def eval_one(self, _: Any) -> None:
        layer = self.model.layers[0]
        layer.train(not layer.training)

    def replace_buffer(self, _: Any) -> None:
        for module in self.modules(nn.BatchNorm1d):
            module.running_mean = torch.full((WIDTH,), 0.3)

    def replace_layer(self, _: Any) -> None:
        for index, layer in enumerate(self.model.layers):
            if isinstance(layer, nn.GELU):
                self.model.layers[index] = nn.Tanh()

    def add_hook(self, _: Any) -> None:
        self.model.layers[-1].register_forward_hook(lambda module, inputs, output: output * 1.1)

    def float64_by_default(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return self.step([batch])
        finally:
            torch.set_default_dtype(torch.float32)

    def failing_loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self.case.loss == "weighted":
            self.losses.fails = True
            self.expect_error(lambda: self.step([batch]))
            self.losses.fails = False

    def inference_mode(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        with torch.inference_mode():
            self.step_refused(batch)
            return self.forward(batch[0])

    def step_refused(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """A step that one side refuses before it does anything, and the other would break off in the middle."""

    def expect_error(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception:
            self.optimizer.zero_grad()
            return
        raise Differs("a call that cannot be made was made")

    # What the two sides do each in their own way.

    def step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        raise NotImplementedError

    def gradient(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def wrong_batch(self, batch: Any) -> Any:
        raise NotImplementedError

    def write_weight(self, batch: Any) -> None:
        """Refused by one side for what it is, so done by neither."""

    def weights(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class Plain(Side):
    """The loop that everybody writes."""

    def step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        self.optimizer.zero_grad()
        losses, aux = [], None
        for batch in batches:
            loss, aux = self._value(batch)
            with torch.autocast("cpu", enabled=False):  # backward is called outside, as PyTorch asks
                loss.backward()
            losses.append(loss.detach())
        # Divided after the sum, as here: a bias before a BatchNorm has a gradient of rounding alone, which Adamax and
        # its kin blow up to whole steps.
        for parameter in self.model.parameters():
            if parameter.grad is not None and len(batches) > 1:
                parameter.grad.div_(len(batches))
        self.update()
        return torch.stack(losses).mean(), aux

    def update(self) -> None:
        policy = dict(self.case.policy)
        parameters = list(self.model.parameters())
        if "clip" in policy:
            nn.utils.clip_grad_norm_(parameters, policy["clip"])
        if "clip_value" in policy:
            nn.utils.clip_grad_value_(parameters, policy["clip_value"])
        with torch.autocast("cpu", enabled=False):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _value(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        value = self.loss(self.model, *batch)
        return value if isinstance(value, tuple) else (value, None)

    def gradient(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        loss, aux = self._value(batch)
        with torch.autocast("cpu", enabled=False):
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found, strict=True))
        return loss.detach(), aux, dict(zip(named, zeros, strict=True))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.model(x)

    def wrong_batch(self, batch: Any) -> None:
        return None  # an error, and nothing changes

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())


class Ours(Side):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        policy = Policy(lower="eager", **{"kernels": False, **dict(case.policy)})
        self.sharded = compile_sharded(self.model, self.optimizer, loss=self.loss, policy=policy)

    def step(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        for batch in batches[:-1]:
            self.sharded.accumulate(*batch)
        value = self.sharded.step(*batches[-1])
        return value if isinstance(value, tuple) else (value, None)

    def gradient(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        value, flat = self.sharded.value_and_grad(*batch)
        loss, aux = value if isinstance(value, tuple) else (value, None)
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        return loss, aux, {name: gradient.view(shapes[name]) for name, gradient in flat.items() if name in shapes}

    def forward(self, x: torch.Tensor) -> Any:
        return self.sharded(x)

    def wrong_batch(self, batch: Any) -> None:
        try:
            self.sharded.step(batch[0][:, :2], batch[1])
        except (*REFUSED, RuntimeError):
            return
        raise Differs("a batch of the wrong width was taken")

    def step_refused(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.expect_error(lambda: self.step([batch]))

    def write_weight(self, batch: Any) -> None:
        with torch.no_grad():
            self.expect_error(lambda: self.model.head.weight.mul_(0.5))

    def weights(self) -> dict[str, torch.Tensor]:
        return self.sharded.full_state_dict()


class Differs(AssertionError):
    """The two sides gave other numbers."""


@dataclass
class Outcome:
    """What became of a case: ``refused`` (with the error's first line), ``differs``, ``crashed``, or empty: right."""

    case: Case
    kind: str = ""
    said: str = ""
    trace: str = field(default="", repr=False)


def run(case: Case) -> Outcome:
    """Both sides, call by call."""
    try:
        plain = Plain(case)
        ours = Ours(case)
        bound = HALF if case.autocast or "autocast step" in case.actions else CLOSE
        torch.manual_seed(case.seed + 1)
        for call, action in enumerate(case.actions):
            before = torch.get_rng_state()
            expected = plain.act(action, call)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            got = ours.act(action, call)
            where = f"call {call} ({action})"
            compare(got, expected, bound, f"what {where} gave")
            if action != "wrong batch" and not torch.equal(torch.get_rng_state(), after):
                raise Differs(f"{where} left the generator elsewhere")
            torch.set_rng_state(after)
        compare(ours.weights(), plain.weights(), bound, "the state at the end")
        compare(rates(ours.optimizer), rates(plain.optimizer), 0.0, "the rates at the end")
    except Differs as error:
        return Outcome(case, "differs", str(error))
    except REFUSED as error:
        return Outcome(case, "refused", str(error).splitlines()[0], traceback.format_exc())
    except Exception as error:
        return Outcome(case, "crashed", f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc())
    return Outcome(case)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def _sorted(value: Any) -> Any:
    """Dictionaries by name, however they were filled."""
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return type(value)(map(_sorted, value)) if type(value) in (tuple, list) else value


def compare(got: Any, expected: Any, bound: float, what: str) -> None:
    mine, spec = pytree.tree_flatten(_sorted(got))
    theirs, other = pytree.tree_flatten(_sorted(expected))
    if isinstance(got, dict) and isinstance(expected, dict) and got.keys() != expected.keys():
        raise Differs(f"{what} has other names: {sorted(got.keys() ^ expected.keys())}")
    if len(mine) != len(theirs):
        raise Differs(f"{what} has another form: {spec}, expected {other}")
    for place, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        if not isinstance(right, torch.Tensor):
            if left != right:
                raise Differs(f"{what}, entry {place}: {left}, expected {right}")
            continue
        left, right = left.detach(), right.detach()
        if left.shape != right.shape or left.dtype != right.dtype:
            raise Differs(
                f"{what}, entry {place}: {left.dtype} {list(left.shape)}, expected {right.dtype} {list(right.shape)}"
            )
        scale = max(float(right.double().abs().max()) if right.numel() else 0.0, 1e-2)
        off = float((left.double() - right.double()).abs().max()) if right.numel() else 0.0
        if not off <= bound * scale and not torch.equal(left.isnan(), right.isnan()):
            raise Differs(f"{what}, entry {place}: not finite where the other is")
        if off == off and off > bound * scale:
            raise Differs(f"{what}, entry {place}: off by {off:.3g} of {scale:.3g}")


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less."""
    for index in range(len(case.actions)):
        yield replace(case, actions=case.actions[:index] + case.actions[index + 1 :])
    for index in range(len(case.layers)):
        yield replace(case, layers=case.layers[:index] + case.layers[index + 1 :])
    simple = replace(case, groups=False, schedule="none", policy=(), autocast=False, rows=case.rows[:1])
    for name in ("groups", "schedule", "policy", "autocast", "rows"):
        if getattr(case, name) != getattr(simple, name):
            yield replace(case, **{name: getattr(simple, name)})
    for name, plain in (("loss", "mse"), ("optimizer", "sgd")):
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})


def shrunk(outcome: Outcome) -> Outcome:
    """The smallest case found that fails in the same way."""
    found = True
    while found:
        found = False
        for case in smaller(outcome.case):
            if (other := run(case)).kind == outcome.kind:
                outcome, found = other, True
                break
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100, help="how many programs (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--seed", type=int, help="this program alone")
    given = parser.parse_args(arguments)
    seeds = [given.seed] if given.seed is not None else range(given.start, given.start + given.count)
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for seed in seeds:
        outcome = run(make_case(seed))
        counts[outcome.kind or "right"] += 1
        if given.seed is not None:
            print(outcome.case)
        if outcome.kind == "refused":
            refusals[outcome.said[:100]] += 1
        elif outcome.kind:
            print(f"seed {seed}: {outcome.kind}: {outcome.said}", flush=True)
            least = shrunk(outcome)
            print(f"  at its smallest: {least.said}\n  {least.case}", flush=True)
            if least.trace:
                print(least.trace)
        elif seed % 50 == 49:
            print(f"{seed + 1 - seeds[0]} of {len(seeds)}: {dict(counts)}", flush=True)
    print(dict(counts))
    for said, count in refusals.most_common():
        print(f"{count:>5} refused: {said}")
    return 1 if counts["differs"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
