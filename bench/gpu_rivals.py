"""Rivals of `gpu_step`: each builds its own copy of the model and gives one step on a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from bench.gpu_models import Setting, loss_of
from fsdp_compiled import Policy, compile_sharded

Step = Callable[[Tensor], Tensor]
OURS, REFERENCE, CASTS = "ours", "fsdp2", "ours-casts"
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def ours(graph: bool, copies: bool | Literal["auto"] = "auto") -> Callable[[Setting], Step]:
    def build(setting: Setting) -> Step:
        model = setting.model()
        lower = "eager" if setting.tiny else "inductor"
        graphed: bool | Literal["auto"] = graph if setting.device.type == "cuda" else "auto"
        policy = Policy(precision=setting.precision, lower=lower, cuda_graph=graphed, copies=copies)
        return compile_sharded(model, AdamW(model.parameters(), **ADAMW), loss=loss_of, policy=policy).step

    return build


def sharded_model(setting: Setting, compiled: bool) -> nn.Module:
    model = setting.model()
    mesh = init_device_mesh(setting.device.type, (1,))
    for block in setting.blocks(model):
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=setting.precision)
    fully_shard(model, mesh=mesh, mp_policy=setting.precision)
    return model


def eager_step(model: nn.Module, capturable: bool = False, loss: Callable[..., Tensor] = loss_of) -> Step:
    optimizer = AdamW(model.parameters(), fused=True, capturable=capturable, **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        value = loss(model, tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def fsdp2(compiled: bool) -> Callable[[Setting], Step]:
    return lambda setting: eager_step(sharded_model(setting, compiled))


def fsdp2_graph(setting: Setting) -> Step:
    """FSDP2's eager step, captured whole after three steps on the capture's stream."""
    step = eager_step(sharded_model(setting, compiled=False), capturable=True)
    held = setting.batches(1)[0].clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    result: list[Tensor] = []
    calls = 0

    def run(tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        held.copy_(tokens)
        if calls <= 3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = step(held)
            torch.cuda.current_stream().wait_stream(stream)
            return loss.clone()
        if calls == 4:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result.append(step(held))
        graph.replay()
        return result[0].clone()

    return run


def reduce_overhead(setting: Setting) -> Step:
    """Nothing sharded, compiled whole; parameters are cast to the compute dtype as FSDP2 casts them."""
    dtype = setting.preset.dtype

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        if dtype == torch.float32:
            return loss_of(model, tokens)
        cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        return torch.func.functional_call(
            _Loss(model), {f"model.{name}": value for name, value in cast.items()}, tokens
        )

    model = setting.model()
    compiled = torch.compile(loss, mode="reduce-overhead")
    optimizer = AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        value = compiled(model, tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach().clone()

    return step


class _Loss(nn.Module):
    """The loss as a module, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(self.model, tokens)


RIVALS: dict[str, tuple[str, Callable[[Setting], Step], bool]] = {  # title, build, needs a GPU
    OURS: ("this package, one CUDA graph", ours(True), False),
    "ours-ungraphed": ("this package, no graph", ours(False), False),
    REFERENCE: ("FSDP2, fused AdamW", fsdp2(False), False),
    "fsdp2-compile": ("FSDP2 + torch.compile per block", fsdp2(True), True),
    "fsdp2-graph": ("FSDP2, its eager step in a CUDA graph", fsdp2_graph, True),
    "reduce-overhead": ("unsharded, torch.compile(reduce-overhead)", reduce_overhead, True),
    CASTS: ("this package, one CUDA graph, no copies in the compute dtype", ours(True, copies=False), False),
}
