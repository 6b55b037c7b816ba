"""What is not right under tensor parallelism, and what each of two ranks is told.

torchrun --nproc-per-node 2 tensor_parallel_refusals.py RESULT
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import Sharded, compile_sharded
from tests.cut_models import GPT, HEAD, VOCABULARY, WIDTH, batch, build, cut, loss_fn, sgd
from tests.launch import answer_all, told
from tests.toys import EAGER
from tests.untraced import Queue


def refusals() -> Any:
    """What each rank is told, by what is wrong."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    tp = mesh["tp"]
    columns = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def first(model: GPT, plan: dict[str, Any], on: DeviceMesh = tp) -> GPT:
        parallelize_module(model.layers[0], on, plan)
        return model

    def made(model: nn.Module, mesh: Any = mesh, loss: Any = loss_fn, kind: Any = None, **options: Any) -> Sharded:
        optimizer = kind(model.parameters()) if kind is not None else sgd(model)
        return compile_sharded(model, optimizer, loss=loss, mesh=mesh, policy=replace(EAGER, **options))

    def partial() -> GPT:
        model = build()
        model.norm.weight = nn.Parameter(DTensor.from_local(torch.ones(WIDTH), tp, [Partial()]))
        return first(model, columns)

    def buffered() -> GPT:
        model = build()
        model.register_buffer("table", distribute_tensor(torch.ones(4), tp, [Replicate()]))
        return first(model, columns)

    def forgotten() -> None:
        """A norm of heads that goes on with parts as plain tensors, as Qwen 3's does under a plan for Llama."""
        model = cut(build(), tp)
        model.layers[0].attention.scale = nn.Parameter(torch.ones(HEAD))
        kind = type(model.layers[0].attention)

        class Scaled(kind):  # type: ignore[misc, valid-type]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                b, t, _ = x.shape
                q = self.q(x).view(b, t, -1, HEAD) * self.scale
                y = torch.softmax(q @ q.transpose(-1, -2), -1) @ self.v(x).view(b, t, -1, HEAD)
                return self.o(y.reshape(b, t, -1))

        model.layers[0].attention.__class__ = Scaled
        made(model).step(*batch(0, 0))

    def part_of_classes() -> None:
        model = build()
        parallelize_module(model, tp, {"head": ColwiseParallel()})
        model.tokens.weight = nn.Parameter(torch.ones(VOCABULARY, WIDTH))
        made(model, loss=lambda model, tokens, targets: model(tokens).square().mean()).step(*batch(0, 0))

    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))["tp"]
    one_axis = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    heads = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
    cases: dict[str, Callable[[], Any]] = {
        "no axis": lambda: made(first(build(), columns), one_axis),
        "no mesh": lambda: made(first(build(), columns), None),
        "other mesh": lambda: made(first(build(), columns, other)),
        "partial": lambda: made(partial()),
        "nothing cut": lambda: made(first(build(), {"nowhere": ColwiseParallel()})),
        "buffer": lambda: made(buffered()),
        "dynamic": lambda: made(first(build(), columns), dynamic=True),
        "join": lambda: made(first(build(), columns), weigh="rows").join().__enter__(),
        "eager optimizer": lambda: made(first(build(), columns), kind=Queue),
        "heads": lambda: made(first(build(head=WIDTH), heads)).step(*batch(0, 0)),
        "forgotten": forgotten,
        "parts": part_of_classes,
    }
    return {name: told(case) for name, case in cases.items()}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    answer_all([refusals], sys.argv[1])
