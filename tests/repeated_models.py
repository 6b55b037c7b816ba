"""Models of a list of blocks that are equal, or are but for one, or do more than compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, ODD = 7, 4, 4
FACTORS: list[int] = []


class Shared:
    """An object that all blocks have."""

    def __init__(self) -> None:
        self.factor = 2.0


class Cache:
    """What a model makes for one forward, and each block puts something into."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor | None] = [None] * LAYERS

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())

    def keep(self, x: torch.Tensor, index: int) -> torch.Tensor:
        self.kept[index] = x
        return x * 2


class State:
    """Reached by a global name; while a model runs it is another."""

    def __init__(self, factor: float = 3.0) -> None:
        self.factor = factor
        self.found: dict[Any, Any] | None = None


STATE = State(1.0)


class Block(nn.Module):
    def __init__(self, index: int, like: str, shared: Shared) -> None:
        super().__init__()
        self.index, self.like, self.shared, self.calls, self.factor = index, like, shared, 0, 1.0
        self.kind = "other" if like == "read outside" and index == ODD else "one"
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2 if like == "another dropout" and index == ODD else 0.1)
        odd = index == ODD
        self.zero = -0.0 if like == "minus zero" and odd else 0.0
        self.table = {"a": 1.0, "b": 2.0} if like == "longer table" and odd else {"a": 1.0}
        if like == "defaults":
            self.table = defaultdict(lambda: 3.0)
        self.second = nn.Linear(WIDTH, WIDTH) if like in ("tied inside", "checkpointed inside") else None
        if like == "tied inside" and odd:
            self.second.weight = self.linear.weight  # type: ignore[union-attr]
        if like == "an attribute more" and odd:
            self.linear.flag = True  # type: ignore[assignment]
        power = 3 if index == ODD else 2
        self.act = lambda y: y**power
        how = "none" if like == "another partial function" and odd else "tanh"
        self.partial = partial(nn.functional.gelu, approximate=how)
        self.state = State() if like in ("another global", "one of a global's kind") and odd else STATE
        if like == "writes a buffer":
            self.register_buffer("seen", torch.zeros(WIDTH))
        self.plain = torch.ones(WIDTH) * (index + 1) if like == "plain tensors" else None
        if like == "experts":
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(
        self,
        x: torch.Tensor,
        factor: float = 1.0,
        bias: torch.Tensor | None = None,
        *,
        masks: tuple[torch.Tensor, ...] = (),
        more: str | None = None,
    ) -> Any:
        y = self.linear(x) * factor * self.factor
        for mask in masks:
            y = y * mask
        if self.like in ("shared", "shared changes"):
            y = y * self.shared.factor
        if self.like == "counts":
            self.calls += 1
        if self.like in ("global set before", "global set for one", "global collects"):
            y = y * STATE.factor if STATE.found is not None and "none" not in STATE.found else y
        if self.like in ("another global", "one of a global's kind"):
            y = y * self.state.factor
        if self.like == "global collects":
            STATE.found[self.like] = STATE.found.get(self.like, 0.0) + 1.0  # type: ignore[index, union-attr]
        if self.like in ("dropout", "another dropout", "one in eval mode"):
            y = self.drop(y)
        if self.like == "closure":
            y = self.act(y)
        if self.like == "writes a buffer":
            self.seen.copy_(y.detach().mean(0))
        if self.like == "global":
            FACTORS.append(self.index)
        if self.like == "no grad":
            with torch.no_grad():
                y = y + self.linear(x)
        if self.like == "autocast inside":
            with torch.autocast("cpu", torch.bfloat16):
                y = y + self.linear(x).float()
        if self.like == "written in pieces":
            y = y.clone()
            y[0] = x[1]
            y[1, 2] = 3.0
        if self.like == "writes its input in pieces":
            x[0] = 2.0
        if self.like == "writes its input":
            x.mul_(2)
        if self.like == "a hook on a tensor":
            y.register_hook(lambda gradient: gradient * 2)
        if self.like == "an attribute of its argument":
            y = y * 2 if hasattr(x, "mark") else y
        if self.like == "an attribute more":
            y = y * 2 if hasattr(self.linear, "flag") else y
        if self.like == "defaults":
            y = y * self.table.get("c", 0.5)
        if self.like == "longer table":
            y = y * len(self.table)
        if self.like == "minus zero":
            y = y + self.zero
        if self.like == "tied inside":
            y = self.second(y)  # type: ignore[misc]
        if self.like == "checkpointed inside":
            y = y + checkpoint(self.second, x, use_reentrant=False)
        if self.like == "random":
            y = y * torch.rand(WIDTH)
        if self.like == "plain tensors":
            y = y * self.plain
        if self.like == "reads and does not use":
            self.drop(self.linear.weight)
            y = x * self.linear.bias
        if self.like == "experts":
            for expert in self.experts:
                y = y + expert(x)
        if self.like == "a function inside":
            total = self.factor

            def added(value: float) -> torch.Tensor:
                nonlocal total
                total += value
                return y * total

            y = added(1.0) + added(2.0)
        if self.like in ("partial functions", "another partial function"):
            y = self.partial(y)
        if self.like == "collects in a new object":
            STATE.found.factor += 1.0  # type: ignore[union-attr]
            y = y * STATE.found.factor  # type: ignore[union-attr]
        if self.kind == "other":
            y = y.sin()
        if self.like == "an attribute of its result":
            y = x + y
            y.mark = self.index + 1.0  # type: ignore[attr-defined]
            return y
        if self.like == "returns its argument":
            return x, x + y
        if self.like == "fills an object":
            y = masks.keep(y, self.index)  # type: ignore[attr-defined]
        if more == "other":
            y = y * 3
        if self.like == "hands on":
            bias = self.linear.weight.sum() if bias is None else bias
            return x + y + bias, bias, more
        if self.like in ("views", "views written later"):
            return (x + y).flatten().view(x.shape)
        if self.like == "views of its argument":
            return x.flatten().view(x.shape), x + y
        return x + y


class Model(nn.Module):
    def __init__(self, like: str) -> None:
        super().__init__()
        self.like, self.depth, shared = like, LAYERS, Shared()
        self.shared = shared
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(index, like, shared) for index in range(LAYERS))
        self.texts = ["some"] * LAYERS
        self.last = torch.ones(WIDTH) * 3 if like == "plain tensors" else None
        if like == "tied":
            self.layers[5].linear.weight = self.layers[2].linear.weight
        if like == "frozen":
            self.layers[4].linear.weight.requires_grad_(False)
        if like == "one in eval mode":
            self.layers[4].eval()
        if like == "hook":
            self.layers[3].linear.register_forward_hook(lambda module, args, result: result * 2)
        if like == "own forward":
            self.layers[3].forward = lambda x: x * 3
        if like == "another class inside":
            self.layers[3].linear = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def blocks(self) -> nn.ModuleList:
        if self.like == "a slice":
            return self.layers[: self.depth]
        if self.like == "a slice with more":
            layers = self.layers[1:-1]
            layers.insert(0, self.layers[0])
            layers += self.layers[-1:]
            assert layers[-1] is self.layers[-1] and "5" in dict(layers.named_children()) and len(layers) == LAYERS
            return layers
        if self.like == "a slice backwards":
            return self.layers[::-1][::-1]
        if self.like == "a new list":
            return nn.ModuleList(list(self.layers))
        return self.layers

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, more: str | None = None) -> torch.Tensor:
        x = self.first(x)
        masks = (x.sin(), x.cos())
        seen: list[torch.Tensor] = []
        cache: Any = Cache() if self.like == "fills an object" else None
        if "global " in self.like or self.like == "another global":
            STATE.factor, STATE.found = 2.0, {"some": [1.0, (None, "text")]}
        if self.like == "one of a global's kind":
            x = x * STATE.factor
        if self.like == "collects in a new object":
            STATE.found = Shared()  # type: ignore[assignment]
        for index, layer in enumerate(self.blocks()):
            if self.like == "read outside" and layer.kind == "other":
                x = x + 1
            if self.like == "global set for one":
                STATE.factor = 3.0 if index == ODD else 2.0
            if self.like == "shared changes":
                self.shared.factor = float(index)
            if self.like == "an attribute of its argument" and index == ODD:
                x = x * 1
                x.mark = True  # type: ignore[attr-defined]
            if self.like == "strides" and index == ODD:
                x = x.t().contiguous().t()
            if self.like == "arguments":
                x = layer(x, 0.5, masks=masks)
            elif self.like == "numbers":
                x = layer(x, factor=1.0 if index < 4 else 2.0)
            elif self.like == "twice":
                x = layer(layer(x))
            elif self.like == "some without gradient":
                with torch.set_grad_enabled(index < 4):
                    x = layer(x)
            elif self.like == "annotated":
                with torch.fx.traceback.annotate({"layer": index}):
                    x = layer(x)
            elif self.like == "autocast for one":
                with torch.autocast("cpu", torch.bfloat16, enabled=index == ODD):
                    x = layer(x)
            elif self.like == "fills an object":
                x = layer(x, masks=cache)
            elif self.like == "texts":
                x = layer(x, more=self.texts[index])
            elif self.like == "hands on":
                x, bias, more = layer(x, 1.0, bias, more=more)
            elif self.like in ("returns its argument", "views of its argument"):
                _, x = layer(x)
            elif self.like == "numbers of one value":
                x = layer(x, factor=-0.0 if index == ODD else 0.0)
            elif self.like in ("written later", "views written later"):
                x = layer(x)
                seen.append(x)
            else:
                x = layer(x)
        if self.like == "plain tensors":
            x = x * self.last
        if self.like == "an attribute of its result":
            x = x * x.mark  # type: ignore[attr-defined]
        if self.like == "read after":
            x = x * sum(layer.linear.weight.square().sum() for layer in self.layers)
        if self.like == "differentiated inside":
            (slope,) = torch.autograd.grad(x.sum(), self.layers[4].linear.weight, create_graph=True)
            x = x * slope.square().sum()
        if self.like in ("written later", "views written later"):
            with torch.no_grad():
                seen[3].add_(1)
            x = x * seen[3].detach() + seen[4].requires_grad * seen[5].detach()
        STATE.factor, STATE.found = 1.0, None
        return x + self.first.weight.sum() if self.like == "some without gradient" else x


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens.new_ones(2, WIDTH, dtype=torch.float32)).square().mean()
