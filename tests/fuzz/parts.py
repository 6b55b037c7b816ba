"""What the fuzzer's programs are made of: layers, models, losses and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, OUT = 6, 3


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


class Half(nn.Module):
    """Weights of a half in one group of the optimizer with whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(torch.bfloat16)).to(x.dtype)


class Carried(nn.Module):
    """State that forward replaces, and that backward reads through a view, as it was."""

    state: torch.Tensor

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.read, self.scale = read, nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("state", torch.full((2, WIDTH), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * (1 + self.scale * self.read(self.state).to(x.dtype))
        if self.training and torch.is_grad_enabled():  # of inference mode's tensors backward could read nothing
            self.state = torch.stack([y.detach().float().mean(0), self.state[0]])
        return y


class Absent(nn.Module):
    """Reads what may not be there: an attribute, its class's, a key."""

    factor: float

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), dict[str, float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        try:
            x = x * self.factor
        except AttributeError:
            x = x * 0.9
        with contextlib.suppress(KeyError):
            x = x * self.table["factor"]
        return x


class Bank(nn.Module):
    """A buffer that a loss returns, and the loop writes."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.full((WIDTH,), 0.1))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.bank


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
# Drawn by every fifth seed beside others, as `LATER`.
LATER_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "half": Half,
    "carried": lambda: Carried(lambda state: state.sum(0)),
    "carried view": lambda: Carried(lambda state: state.view(-1)[:WIDTH]),
    "carried row": lambda: Carried(lambda state: state.unbind(0)[1]),
    "carried and transposed": lambda: Carried(lambda state: state.t()[:, 0]),
    "absent": Absent,
    "bank": Bank,
}
RANDOM = ("dropout", "noise")


class Model(nn.Module):
    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList({**LAYERS, **LATER_LAYERS}[name]() for name in layers)
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

    def banks(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        """What the loop writes of them is theirs."""
        banks = [module.bank for module in model.modules() if isinstance(module, Bank)]
        return F.mse_loss(model(x).float(), y), {"banks": banks}

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
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "nested": lambda p: Nested(p, 1e-2),
    "untraced": lambda p: Untraced(p, 1e-2),
}
