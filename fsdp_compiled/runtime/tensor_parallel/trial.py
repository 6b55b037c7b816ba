"""Whether a block that is cut along tp computes what it computes whole: tried on generated weights, before it is cut.

    the whole block        y = o(attention(q(x), k(x), v(x)))                     outputs, and the derivatives
                                                                                  by inputs and weights
    its parts, a thread    y = sum over threads of o'(attention(q'(x), k'(x), v'(x)))      the same, or their parts
    for each rank

The user's own code runs on the parts, as it will on the ranks; what `ColwiseParallel` and `RowwiseParallel` send is
handed from thread to thread. Nothing leaves the process, and the model itself is not touched: its weights are neither
read nor copied. Dropout is left out of both sides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.runtime.tensor_parallel.example import Call, copied

TOLERANCE = 1e-3  # of a tensor's norm; a wrong cut is off by its order
NOISE = 1e-5  # of the largest gradient's norm; what is zero but for rounding (a key's bias) is as good as equal
DROPOUT = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """``failure``: why it is not the same, or None. ``summed``: the weights, whole on each rank, whose gradient is the
    sum of what the ranks have."""

    failure: str | None
    summed: frozenset[str] = frozenset()


@dataclass
class Results:
    """Of one rank: what came out, and the derivatives of its product with fixed numbers."""

    outputs: list[Any] = field(default_factory=list)
    inputs: list[torch.Tensor | None] = field(default_factory=list)
    weights: dict[str, torch.Tensor | None] = field(default_factory=dict)


class Broken(Exception):
    """The ranks are not at the same place of the program."""


class _Exchange:
    """Where the threads meet."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.slots: list[tuple[str, torch.Tensor | None]] = [("", None)] * ranks

    def summed(self, rank: int, name: str, value: torch.Tensor | None) -> Any:
        self.slots[rank] = name, value
        self.barrier.wait()
        names, values = zip(*self.slots, strict=True)
        shapes = {tuple(one.shape) for one in values if one is not None}
        equal = len(set(names)) == 1 and len(shapes) <= 1
        total = sum(values[1:], values[0]) if equal and value is not None else None
        self.barrier.wait()
        if not equal:
            raise Broken(f"ranks do different things: {', '.join(dict.fromkeys(names))}")
        return total


class _Enter(torch.autograd.Function):
    """What all ranks have goes into parts: derivatives are summed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, exchange: _Exchange, rank: int, name: str) -> torch.Tensor:
        ctx.place = exchange, rank, name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        exchange, rank, name = ctx.place
        return exchange.summed(rank, f"{name}, backward", gradient), None, None, None


class _Leave(torch.autograd.Function):
    """Summands become what all ranks have."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, exchange: _Exchange, rank: int, name: str) -> Any:
        return exchange.summed(rank, name, value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None, None, None


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, kwargs
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def generated(block: nn.Module) -> Any:
    """A copy of the block on the CPU, with weights of our own in float32; buffers have their values, if they have any.

    The same on every rank.
    """
    generator = torch.Generator().manual_seed(0)

    def numbers(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, nn.Parameter):
            if value.is_floating_point():
                drawn = torch.randn(value.shape, generator=generator)
                return nn.Parameter(drawn * value.shape[-1] ** -0.5 if value.dim() > 1 else 1 + drawn / 4)
            return nn.Parameter(filled(value, generator, 2), requires_grad=False)
        return filled(value, generator, 2) if value.is_meta else value.detach().cpu().clone()

    return copied(block, numbers)


def filled(value: torch.Tensor, generator: torch.Generator, below: int) -> torch.Tensor:
    """A tensor like it on the CPU: normal numbers, whole ones below so many, masks that leave everything in."""
    shape = value.shape
    if value.is_floating_point():
        return torch.randn(shape, generator=generator)
    if value.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    return torch.randint(0, below, shape, generator=generator).to(value.dtype)


def part(value: torch.Tensor, style: str | None, name: str, ranks: int, rank: int) -> torch.Tensor:
    """What a rank has of a linear layer's weight or bias, or of its gradient."""
    if style == "colwise":
        return value.chunk(ranks, 0)[rank]
    return value.chunk(ranks, 1)[rank] if style == "rowwise" and name == "weight" else value


def tried(whole: nn.Module, call: Call, styles: Mapping[str, str], ranks: int) -> Verdict:
    """Whether the block, cut by these styles (``colwise``, ``rowwise``; by module name), computes the same.

    ``whole``: a `generated` copy. ``summed`` are weights whose gradients are summands; they are no failure.
    """
    try:
        expected = run(part_of_block(whole, {}, 1, 0), call)
    except Exception as error:
        return Verdict(f"it could not be run on the CPU by itself: {_said(error)}")
    exchange = _Exchange(ranks)
    found: list[Results | Exception] = [Broken("not run")] * ranks

    def work(rank: int) -> None:
        try:
            parts = part_of_block(whole, styles, ranks, rank)
            _connect(parts, styles, exchange, rank)
            found[rank] = run(parts, call)
            exchange.summed(rank, "the end", None)
        except Exception as error:
            found[rank] = error
            exchange.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), name=f"trial of rank {rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in found if isinstance(one, Exception)]
    if errors:
        own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        return Verdict(f"on parts it fails: {_said((own or errors)[0])}")
    return _compare(expected, [one for one in found if isinstance(one, Results)], styles)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def part_of_block(whole: nn.Module, styles: Mapping[str, str], ranks: int, rank: int) -> Any:
    """The parts of one rank; of tied weights, as the first module that has them is cut."""
    owners: dict[int, tuple[str | None, str]] = {}
    for path, module in whole.named_modules():
        for name, value in module._parameters.items():
            if value is not None:
                owners.setdefault(id(value), (styles.get(path), name))

    def own(value: torch.Tensor) -> torch.Tensor:
        style, name = owners.get(id(value), (None, ""))
        copy = part(value.detach(), style, name, ranks, rank).clone()
        return nn.Parameter(copy, value.requires_grad) if isinstance(value, nn.Parameter) else copy

    return copied(whole, own)


def _connect(block: nn.Module, styles: Mapping[str, str], exchange: _Exchange, rank: int) -> None:
    for name, style in styles.items():
        module: Any = block.get_submodule(name)
        if style == "colwise":
            module.register_forward_pre_hook(_entering(exchange, rank, name))
        else:
            module.forward = _leaving(module, exchange, rank, name)


def _entering(exchange: _Exchange, rank: int, name: str) -> Callable[..., Any]:
    def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
        if not args:
            raise TypeError(f"{name} is called with its input as a keyword, where PyTorch's plans do not see it")
        return _Enter.apply(args[0], exchange, rank, name), *args[1:]

    return before


def _leaving(module: nn.Linear, exchange: _Exchange, rank: int, name: str) -> Callable[..., Any]:
    def forward(value: torch.Tensor) -> Any:
        total = _Leave.apply(F.linear(value, module.weight), exchange, rank, name)
        return total if module.bias is None else total + module.bias

    return forward


def run(block: nn.Module, call: Call) -> Results:
    """Forward on the generated inputs, and backward of its product with generated numbers."""
    generator = torch.Generator().manual_seed(1)
    below = min([one.num_embeddings for one in block.modules() if isinstance(one, nn.Embedding)], default=2)
    leaves: list[torch.Tensor] = []

    def given(value: torch.Tensor) -> torch.Tensor:
        made = filled(value, generator, below)
        if not value.requires_grad:
            return made
        leaves.append(made.requires_grad_())
        return made.clone()  # which may be written to

    args, kwargs = pytree.tree_map_only(torch.Tensor, given, (call.args, call.kwargs))
    with torch.enable_grad(), _WithoutDropout():
        outputs = [one for one in pytree.tree_leaves(block(*args, **kwargs)) if isinstance(one, torch.Tensor)]
        product = [
            (one * torch.randn(one.shape, generator=generator)).sum()
            for one in outputs
            if one.is_floating_point() and one.requires_grad
        ]
        if not product:
            raise TypeError("it returns nothing that can be differentiated")
        torch.stack(product).sum().backward()
    weights = {name: one.grad for name, one in named_parameters(block)}
    return Results([one.detach() for one in outputs], [one.grad for one in leaves], weights)


def _compare(expected: Results, found: list[Results], styles: Mapping[str, str]) -> Verdict:
    scale = max([one.norm().item() for one in expected.weights.values() if one is not None], default=0.0)

    def same(mine: torch.Tensor | None, true: torch.Tensor | None, noise: float = 0.0) -> bool:
        if mine is None or true is None:
            return mine is true
        if mine.shape != true.shape:
            return False
        if not true.is_floating_point():
            return torch.equal(mine, true)
        return bool((mine - true).norm() <= TOLERANCE * true.norm() + noise)

    for one in found:
        if len(one.outputs) != len(expected.outputs) or not all(map(same, one.outputs, expected.outputs)):
            return Verdict("it gives another result on parts")
        if not all(same(mine, true, NOISE * scale) for mine, true in zip(one.inputs, expected.inputs, strict=True)):
            return Verdict("it has other derivatives on parts")
    summed = set()
    for name, true in expected.weights.items():
        path, _, last = name.rpartition(".")
        mine = [one.weights[name] for one in found]
        cut = [
            None if true is None else part(true, styles.get(path), last, len(found), rank)
            for rank in range(len(found))
        ]  # fmt: skip
        if all(same(value, other, NOISE * scale) for value, other in zip(mine, cut, strict=True)):
            continue
        values = [value for value in mine if value is not None]
        if path in styles or len(values) < len(mine) or not same(sum(values[1:], values[0]), true, NOISE * scale):
            return Verdict(f"the gradient of {name} is another on parts")
        summed.add(name)
    return Verdict(None, frozenset(summed))
