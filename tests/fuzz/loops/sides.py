"""The two that run a loop: `Plain`, whose gradients are reduced by hand, and `Ours`, which `fully_shard` took.

What `fully_shard` says of gradients is written down here, in `Plain`: each backward reduces the sum of what was held
back and its own; hooks of parameters see that, once a backward; then it is added to ``grad``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled import Policy, fully_shard, register_fsdp_forward_method
from tests.fuzz.loops.model import LENGTH, WORDS, Model, Shape, logits_of
from tests.loops import full as whole

HALF = torch.bfloat16
PRECISIONS: dict[str, dict[str, Any]] = {
    "half": {"param_dtype": HALF},
    "half, reduced in whole": {"param_dtype": HALF, "reduce_dtype": torch.float32},
    "half, given back in whole": {"param_dtype": HALF, "reduce_dtype": torch.float32},  # by the model
    "half, reduced in half": {"param_dtype": HALF, "reduce_dtype": HALF},
    "whole, reduced in half": {"reduce_dtype": HALF},
    "half, inputs as they are": {"param_dtype": HALF, "cast_forward_inputs": False},
}
Hook = Callable[[torch.Tensor], torch.Tensor | None]


class Side:
    """A model, its optimizers, and what a person has set; the same on both sides."""

    def __init__(self, shape: Shape, seed: int, rank: int, world: int) -> None:
        self.shape, self.rank, self.world = shape, rank, world
        torch.manual_seed(seed)
        self.model = Model(shape).to(shape.dtype)
        if shape.wrapped == "checkpoint":
            for place, block in enumerate(self.model.layers):
                self.model.layers[place] = checkpoint_wrapper(block)
        self.take()
        self.make: Any = None  # an optimizer of parameters
        self.optimizers: list[torch.optim.Optimizer] = []
        self.rows, self.masked = 2, False
        self.synchronises, self.factor = True, float(world)
        self.kept: dict[str, Any] = {}  # what steps leave for later ones: state dicts, averages, scalers
        self.handles: list[Any] = []  # of hooks
        self.hooked = False  # whether parameters have hooks
        self.seen: list[tuple[str, torch.Tensor]] = []  # by hooks, in this step, of whom
        self.loose = False  # once something was rounded to bfloat16

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def batch(self, rng: Any, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's own."""
        generator = torch.Generator().manual_seed(rng.randrange(10**6) * self.world + self.rank)
        shape = (rows or self.rows, LENGTH)
        return tuple(torch.randint(0, WORDS, shape, generator=generator) for _ in range(2))  # type: ignore[return-value]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(LENGTH) < 3).float().expand(len(y), LENGTH) if self.masked else None
        return loss_of(self.model(x, mask), y)

    # What the two do each in their own way.

    def take(self) -> None:
        raise NotImplementedError

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        raise NotImplementedError

    def gradients(self, loss: torch.Tensor, of: list[nn.Parameter]) -> list[torch.Tensor | None]:
        """`torch.autograd.grad`, reduced."""
        raise NotImplementedError

    def hook(self, name: str, parameter: nn.Parameter, hook: Hook, after: bool) -> None:
        raise NotImplementedError

    def synchronise(self, wanted: bool) -> None:
        self.synchronises = wanted

    def divide(self, factor: float) -> None:
        """Of the root's own parameters."""
        self.factor = factor

    def module(self, call: Callable[[Any], Any]) -> None:
        """What only a model of `fully_shard` has."""

    def gathered(self) -> Any:
        return contextlib.nullcontext()


def loss_of(result: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_of(result).flatten(0, 1).double(), y.flatten())


def precision_of(name: str) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(**PRECISIONS.get(name, {}))


class Plain(Side):
    def take(self) -> None:
        self.held: dict[str, torch.Tensor] = {}  # gradients that were not reduced
        self.hooks: dict[str, list[tuple[bool, Hook]]] = {}

    @contextlib.contextmanager
    def _own(self) -> Iterator[dict[str, torch.Tensor | None]]:
        """Within, ``grad`` is what this backward alone finds; it is put into what is given."""
        named = self.named()
        before, found = {name: one.grad for name, one in named}, {}
        for _, one in named:
            one.grad = None
        try:
            yield found
            found.update((name, one.grad) for name, one in named)
        finally:
            for name, one in named:
                one.grad = before[name]

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        with self._own() as found:
            loss.backward(**options)
        for name, parameter in self.named():
            if self.shape.unreached and found[name] is None and parameter.requires_grad:
                found[name] = torch.zeros_like(parameter)
            if (gradient := found[name]) is not None:
                self.held[name] = self.held[name] + gradient if name in self.held else gradient
            if self.synchronises and name in self.held:
                self._leave(name, parameter, self.reduced(name, self.held.pop(name)))

    def reduced(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        inside = name.startswith("layers") and not self.shape.root_alone
        return gradient / (self.world if inside else self.factor)

    def _leave(self, name: str, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if not parameter.requires_grad:
            return
        for after, hook in self.hooks.get(name, ()):
            if not after and (other := hook(gradient)) is not None:
                gradient = other
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            with torch.no_grad():
                parameter.grad += gradient
        for after, hook in self.hooks.get(name, ()):
            if after:
                hook(parameter)

    def gradients(self, loss: torch.Tensor, of: list[nn.Parameter]) -> list[torch.Tensor | None]:
        names = {id(one): name for name, one in self.named()}
        found = torch.autograd.grad(loss, of, allow_unused=True)
        return [None if one is None else self.reduced(names[id(p)], one) for p, one in zip(of, found, strict=True)]

    def hook(self, name: str, parameter: nn.Parameter, hook: Hook, after: bool) -> None:
        self.hooks.setdefault(name, []).append((after, hook))
        self.handles.append(_Unhook(self.hooks))


class _Unhook:
    def __init__(self, hooks: dict[str, Any]) -> None:
        self.remove = hooks.clear


class Ours(Side):
    undivided = False  # a fault, for the control
    uncast = False  # another
    fully_shard = staticmethod(fully_shard)
    register = staticmethod(register_fsdp_forward_method)
    own_policy = True

    def take(self) -> None:
        options: dict[str, Any] = {"reshard_after_forward": self.shape.reshard}
        if self.shape.mesh == "backwards":
            options["mesh"] = DeviceMesh("cpu", list(range(self.world))[::-1])
        elif self.shape.mesh:
            sizes = (self.world, 1) if self.shape.mesh == "replicas" else (1, self.world)
            options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        options["mp_policy"] = precision_of("" if self.uncast else self.shape.precision)
        if self.own_policy and not self.shape.merged:
            options["policy"] = Policy(lower="eager", bucket_mb=0)
        for block in self.model.layers if self.shape.wrapped == "compile" else []:
            block.compile(backend="eager")
        for block in [] if self.shape.root_alone else self.model.layers:
            self.fully_shard(block, **options)
            if self.undivided:
                block.set_gradient_divide_factor(1.0)
        if "given back" in self.shape.precision:
            options["mp_policy"] = replace(options["mp_policy"], output_dtype=self.shape.dtype)
        if self.shape.apart:
            self.fully_shard(self.model.head, **options)
        self.fully_shard(self.model, **options)
        self.register(self.model, "encode")
        if self.shape.unreached:
            self.model.set_reduce_scatter_unused_params(True)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)

    def gradients(self, loss: torch.Tensor, of: list[nn.Parameter]) -> list[torch.Tensor | None]:
        found = torch.autograd.grad(loss, of, allow_unused=True)
        return [None if one is None else whole(one) for one in found]

    def hook(self, name: str, parameter: nn.Parameter, hook: Hook, after: bool) -> None:
        put = parameter.register_post_accumulate_grad_hook if after else parameter.register_hook
        self.handles.append(put(hook))

    def synchronise(self, wanted: bool) -> None:
        super().synchronise(wanted)
        self.model.set_requires_gradient_sync(wanted)

    def divide(self, factor: float) -> None:
        super().divide(factor)
        self.model.set_gradient_divide_factor(factor)

    def module(self, call: Callable[[Any], Any]) -> None:
        call(self.model)

    def gathered(self) -> Any:
        return self.model.gathered() if self.own_policy else super().gathered()
