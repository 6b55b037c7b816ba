"""Loops over models with weights of classes that say themselves what travels of them; of fully_shard.py.

The classes are torchao's, and one of the tests' own, which is BitNet's in small: forward reads the signs of a weight
and one scale, and the gradient goes to the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.loops import GPT, batch, full, gradients, loss_of

aten = torch.ops.aten
# What FSDP2 asks of a class to lay it out; of what else operators make, ordinary tensors come.
LAYING_OUT = (
    aten.detach.default, aten.split.Tensor, aten.new_zeros.default, aten.slice.Tensor, aten.view.default,
    aten.as_strided.default, aten.clone.default, aten.empty_like.default, aten._to_copy.default,
)  # fmt: skip


class SignLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Signs, bias: torch.Tensor | None) -> torch.Tensor:
        signs, scale = weight.signs.to(x.dtype), weight.scale
        ctx.save_for_backward(x, signs, scale)
        ctx.biased = bias is not None
        y = x @ signs.t() * scale
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (d,) = given
        x, signs, scale = ctx.saved_tensors
        flat = d.flatten(0, -2)
        return d @ signs * scale, flat.t() @ x.flatten(0, -2), flat.sum(0) if ctx.biased else None


class Signs(torch.Tensor):
    """What is gathered of a `Weight`: what forward computes with."""

    signs: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, signs: torch.Tensor, scale: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, signs.shape, dtype=scale.dtype, device=signs.device)  # type: ignore[attr-defined]
        made.signs, made.scale = signs, scale
        return made

    def __tensor_flatten__(self) -> Any:
        return ["signs", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["signs"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return SignLinear.apply(x, weight, bias[0] if bias else None)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (aten.detach.default, aten.as_strided.default):
            raise NotImplementedError(str(func))
        return cls(args[0].signs, args[0].scale)


class Weight(torch.Tensor):
    """A weight that is trained, of which forward reads the signs."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)  # type: ignore[attr-defined]
        made.inside = inside
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inside"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(cls, lambda one: one.inside, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func is aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, result) if func in LAYING_OUT else result

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert isinstance(module, nn.Linear) and outer_stride == (outer_size[1], 1)
        scale = self.inside.abs().sum()
        dist.all_reduce(scale, group=mesh.get_group())
        dtype = mp_policy.param_dtype or self.inside.dtype
        return (self.inside.sign().to(torch.int8),), (scale / outer_size.numel()).to(dtype)

    def fsdp_post_all_gather(self, outputs: Any, scale: Any, dtype: Any, *, out: Any = None) -> Any:
        assert scale.dtype == dtype
        if out is not None:
            out.scale = scale
            return None
        return Signs(outputs[0], scale), outputs


def of_class(api: Any, mark: dict[str, Any] | None = None, plain: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(**options)
    for layer in model.layers:
        for one in () if plain else (layer.up, layer.down):
            one.weight = nn.Parameter(Weight(one.weight.detach()))  # type: ignore[union-attr]
        api.fully_shard(layer, **(mark or {}))
    return api.fully_shard(model, **(mark or {}))


def held(model: nn.Module) -> list[torch.Tensor]:
    """What this rank has of each parameter."""
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    return [(one.inside if isinstance(one, Weight) else one).detach().clone() for one in parts]


def trained(model: nn.Module, optimizer: Any, steps: int = 3, loss: Callable[..., torch.Tensor] = loss_of) -> list[Any]:
    found: list[Any] = []
    for step in range(steps):
        value = loss(model, step)
        value.backward()
        found += [value.detach(), full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *held(model)]


def own_class(api: Any) -> Any:
    """Checkpointed blocks; evaluation; whole parameters between calls; a state_dict that another model loads."""
    model = of_class(api, checkpointed=True)
    found = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.eval()
    with torch.no_grad():
        found.append(model(batch(5)[0]))
    with torch.inference_mode():
        found.append(model(batch(6)[0]).clone())
    layer = model.layers[0]
    layer.unshard()
    found += [type(layer.up.weight).__name__, layer.up.weight.signs.clone(), layer.up.weight.scale.clone()]
    layer.reshard()
    found.append(type(layer.up.weight.to_local()).__name__)
    other = of_class(api)
    with torch.no_grad():
        for one in other.parameters():
            one.zero_()
    other.load_state_dict(model.state_dict())
    return [*found, *trained(other, torch.optim.SGD(other.parameters(), lr=0.1), 2)]


def own_class_held(api: Any) -> Any:
    """Gradients that are held back; frozen weights; half precision."""
    model = of_class(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Any] = []
    for micro in range(4):
        model.set_requires_gradient_sync(micro % 2 == 1)
        loss_of(model, micro).backward()
        found += gradients(model)
        if micro == 1:
            optimizer.step()
    model.layers[1].up.weight.requires_grad_(False)
    found += trained(model, optimizer, 2)
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = of_class(api, {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy(**half)})
    return [*found, *trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2))]


def own_class_replicas(api: Any) -> Any:
    """Two replicas of one rank each; gradients that wait for the all-reduction."""
    model = of_class(api, {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))})
    for micro in range(3):
        model.set_requires_all_reduce(micro != 1)
        loss_of(model, micro).backward()
    return gradients(model)


def torchao_kinds() -> dict[str, Callable[[nn.Linear], nn.Module]]:
    """By name, what torchao makes of a layer."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
    from torchao.prototype.quantized_training import bitnet_training, int8_weight_only_quantized_training
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Adapted(nn.Module):
        """As QLoRA has it: a frozen weight in four bits, and an adapter."""

        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.weight = nn.Parameter(to_nf4(inner.weight.detach(), 64, 1), requires_grad=False)
            self.a = nn.Linear(inner.in_features, 2, bias=False)
            self.b = nn.Linear(2, inner.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear_nf4(x, self.weight) + self.b(self.a(x))  # type: ignore[no-any-return]

    def quantized(layer: nn.Linear, config: Any) -> nn.Module:
        quantize_(layer, config)
        return layer

    float8 = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return {
        "bitnet": lambda layer: quantized(layer, bitnet_training()),
        "int8": lambda layer: quantized(layer, int8_weight_only_quantized_training()),
        "float8": lambda layer: Float8Linear.from_float(layer, config=float8),
        "nf4": Adapted,
    }


def torchao_model(kind: str | None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16)
    change = torchao_kinds()[kind] if kind is not None else lambda layer: layer
    return nn.Sequential(layers[0], nn.ReLU(), change(layers[1]), nn.ReLU(), layers[2])


def torchao_losses(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """And draws after them: int8's updates draw random numbers."""
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    found = []
    for _ in range(3):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, torch.rand(2)]


def torchao(api: Any) -> Any:
    found = []
    for kind in torchao_kinds():
        model = torchao_model(kind)
        api.fully_shard(model[2])
        found += torchao_losses(api.fully_shard(model), dist.get_rank())
    return found


def broken_class(api: Any) -> Any:
    """Ordinary weights under this package: what must be told apart."""
    model = of_class(api, plain=api is not torch.distributed.fsdp)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)


CASES: tuple[Callable[[Any], Any], ...] = (own_class, own_class_held, own_class_replicas, torchao, broken_class)
