"""Policy(tp=...), broken ties, other models and generated plans on 1 x 2 and 2 x 2 ranks, and a cube of 2 x 2 x 2.

torchrun --nproc-per-node 4 tensor_parallel_models.py RESULT [CASE ...]; 2 ranks: what is of one row; 8: the cube
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compiled import compile_sharded, fully_shard, stretch
from tests.cut_models import (
    RANK,
    STEPS,
    VOCABULARY,
    WIDTH,
    Net,
    adamw,
    batch,
    build,
    compare,
    copies_equal,
    cut,
    loss_fn,
    mean,
    net,
    ours,
    sgd,
    two_by_two,
    unsharded,
)
from tests.derived_models import Experts, Llama, Softmax, Stack
from tests.launch import answer_all, told
from tests.long_sequences import Long, eager, whole
from tests.long_sequences import loss as long_loss
from tests.long_sequences import sgd as long_sgd
from tests.toys import EAGER

warnings.filterwarnings("ignore")
PLAN = {"up": "colwise", "down": "rowwise"}


def transformer(kind: str, tied: bool) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=32, attn_implementation="sdpa", use_cache=False,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def words(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


def by_its_own_plan() -> Any:
    """Qwen 3, whose plan has norms of heads; the tie is kept. One row: all of it is along tp."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    model = transformer("Qwen3", tied=True)
    optimizer = sgd(model)  # over the whole parameters
    sharded = compile_sharded(model, optimizer, loss=words, mesh=mesh, policy=replace(EAGER, tp="auto"))
    mine = [sharded.step(*batch(step, 0)).item() for step in range(STEPS)], [], sharded.full_state_dict()
    reference = transformer("Qwen3", tied=True)
    theirs, losses = sgd(reference), []
    for step in range(STEPS):
        theirs.zero_grad()
        loss = words(reference, *batch(step, 0))
        loss.backward()
        theirs.step()
        losses.append(loss.item())
    found = compare(mine, (losses, [], reference.state_dict()))
    return {"eager": found, "plan": str(sharded.plan), "copies": copies_equal(sharded, mesh),
            "tied": model.lm_head.weight is model.model.embed_tokens.weight}  # fmt: skip


def derived() -> Any:
    """Nobody's plan: of a Llama with a tie, norms of heads, experts and grouped queries, AdamW and clipping."""
    mesh = two_by_two()
    row = mesh["shard"].get_local_rank()

    def make() -> Llama:
        torch.manual_seed(0)
        return Llama(Experts, tied=True, depth=1, norm=True)

    model = make()
    policy = replace(EAGER, tp="auto", clip=0.5)
    sharded = compile_sharded(model, adamw(model), loss=loss_fn, mesh=mesh, policy=policy)
    mine = ours(sharded, row)
    reference = make()
    found = compare(mine, unsharded(reference, adamw(reference), 2, clip=0.5))
    return {"eager": found, "plan": str(sharded.plan), "copies": copies_equal(sharded, mesh),
            "tied": model.head.weight is model.tokens.weight}  # fmt: skip


def stretches() -> Any:
    """Context parallelism on real ranks, which have halves of one sequence; under both faces."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    steps = [tuple(stretch(one, mesh["shard"], one.dim() - 1) for one in whole(step, 0)) for step in range(STEPS)]
    torch.manual_seed(0)
    losses, weights = eager(Long(keys=2), 1)
    torch.manual_seed(0)
    model = Long(keys=2)
    sharded = compile_sharded(model, long_sgd(model), loss=long_loss, mesh=mesh, policy=EAGER)
    mine = [sharded.step(*one).item() for one in steps], [], sharded.full_state_dict()
    torch.manual_seed(0)
    model = Long(keys=2)
    fully_shard(model, mesh=mesh, policy=EAGER)
    optimizer = long_sgd(model)
    seen = []
    for one in steps:
        loss = long_loss(model, *one)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(mean(loss.detach(), 2))
    loop = seen, [], {name: value.full_tensor().detach() for name, value in model.named_parameters()}
    found = {name: compare(run, (losses, [], weights)) for name, run in (("step", mine), ("loop", loop))}
    with context_parallel(mesh["shard"], buffers=[torch.zeros(2, 4)], buffer_seq_dims=[1]):
        said = told(lambda: sharded.step(*steps[0]))
    axes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "cp"))
    return found | {"theirs": said, "cp": told(lambda: compile_sharded(Long(), loss=long_loss, mesh=axes))}


class Scaled(Net):
    """A buffer that the loss is made with, and one that forward writes."""

    scale: torch.Tensor
    seen: torch.Tensor

    def __init__(self, part: bool = False) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) * self.scale
        up = self.up(x)
        self.seen += (up if self.part else x).detach().square().mean()
        return self.head(x + self.down(F.gelu(up)))


def buffers() -> Any:
    """Each rank's are its own before: rank 0's are everybody's afterwards. What of a part is written is refused."""
    mesh = two_by_two()
    row = mesh["shard"].get_local_rank()

    def made(part: bool) -> Any:
        torch.manual_seed(0)
        model = Scaled(part)
        model.scale.fill_(1.0 + RANK)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return compile_sharded(model, sgd(model), loss=loss_fn, mesh=mesh, policy=EAGER)

    sharded = made(part=False)
    first = sharded.step(*batch(0, row)).item()
    reference = net(None)
    expected = sum(loss_fn(reference, *batch(0, r)) for r in range(2)).item() / 2
    values = {name: value.item() for name, value in sharded.state.buffers.items()}
    return {"loss": abs(first - expected), **values, "part": told(lambda: made(part=True).step(*batch(0, row)))}


class Tower(nn.Module):
    def __init__(self, widths: list[int], bias: list[bool]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, widths[0])
        sizes = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=c) for (a, b), c in zip(sizes, bias, strict=True))
        self.head = nn.Linear(widths[-1], VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def generated() -> Any:
    """Models and plans drawn at random, the same on all ranks."""
    mesh = two_by_two()
    row = mesh["shard"].get_local_rank()
    draw = random.Random(int(os.environ.get("TP_SEED", 5)))
    found = []
    for _ in range(2):
        widths = [draw.choice([4, 6, 8, 10]) for _ in range(4)]
        bias = [draw.random() < 0.5 for _ in range(3)]
        styles = {f"layers.{i}": draw.choice(["rowwise", "colwise_gather_output"]) for i in range(3)}
        if draw.random() < 0.5:  # a pair, with what is between them cut; tanh is element-wise
            styles |= {"layers.0": "colwise", "layers.1": "rowwise"}
        whole = {name: RowwiseParallel(input_layouts=Replicate()) for name, s in styles.items() if s == "rowwise"}
        if styles["layers.0"] == "colwise":
            whole["layers.1"] = RowwiseParallel()
        columns = {n: ColwiseParallel(output_layouts=Replicate()) for n, s in styles.items() if "gather" in s}
        columns |= {n: ColwiseParallel() for n, s in styles.items() if s == "colwise"}
        if draw.random() < 0.5:
            whole["tokens"] = RowwiseParallel(input_layouts=Replicate())
        torch.manual_seed(3)
        model = Tower(widths, bias)
        parallelize_module(model, mesh["tp"], {**whole, **columns})
        shard = draw.choice(["zero3", "zero2", "zero1", "ddp"])
        sharded = compile_sharded(
            model, sgd(model), loss=loss_fn, mesh=mesh,
            policy=replace(EAGER, shard=shard, bucket_mb=draw.choice([0, 1]), clip=0.5),
        )  # fmt: skip
        mine = ours(sharded, row)
        torch.manual_seed(3)
        reference = Tower(widths, bias)
        found.append(
            compare(mine, unsharded(reference, sgd(reference), 2, clip=0.5)) | {"plan": str(styles), "shard": shard}
        )
    return found


def refusals() -> Any:
    mesh = two_by_two()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_compiled").addHandler(handler)

    def made(model: nn.Module | None = None, mesh: Any = mesh, **options: Any) -> Any:
        model = model if model is not None else net(None)
        return compile_sharded(model, sgd(model), loss=loss_fn, mesh=mesh, policy=replace(EAGER, **options))

    def stepped() -> None:
        model = net(None)
        optimizer = sgd(model)
        loss_fn(model, *batch(0, 0)).backward()
        optimizer.step()
        compile_sharded(model, optimizer, loss=loss_fn, mesh=mesh, policy=replace(EAGER, tp=PLAN))

    def half_tied() -> None:
        model = net(None)
        model.head.weight = model.tokens.weight
        made(model, tp={"head": "colwise_gather_output"})

    def broken() -> None:
        model = transformer("Llama", tied=True)
        styles = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], styles | {"model.layers.0.mlp.up_proj": ColwiseParallel()})
        made(model)

    def heads() -> None:
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=12, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
            num_key_value_heads=3,
        )  # fmt: skip
        made(transformers.LlamaForCausalLM(config), tp="auto")

    cases: dict[str, Callable[[], Any]] = {
        "no plan": lambda: made(Stack(Softmax), tp="auto"),
        "no such style": lambda: made(tp=PLAN | {"up": "sideways"}),
        "no such module": lambda: made(tp=PLAN | {"layers.*.up": "colwise"}),
        "no such cut": lambda: made(tp=PLAN | {"drop": "colwise"}),
        "no axis": lambda: made(mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)), tp=PLAN),
        "cut before": lambda: made(net(mesh["tp"]), tp=PLAN),
        "dynamic": lambda: made(tp=PLAN, dynamic=True),
        "stepped": stepped,
        "half tied": half_tied,
        "broken tie": broken,
        "heads": heads,
        "other policies": lambda: made(tp=PLAN if RANK else {"head": "colwise_gather_output"}),
    }
    found: dict[str, Any] = {name: told(case) for name, case in cases.items()}
    model = cut(build(), mesh["tp"])
    model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    heard.clear()
    made(model)
    found["warned"] = heard if RANK == 0 else ["tokens.weight and head.weight have the same values"]
    return found


def cube() -> Any:
    """Two replicas, of two shards, of two parts."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    row = 2 * mesh["replicate"].get_local_rank() + mesh["shard"].get_local_rank()
    model = net(mesh["tp"], classes=True)
    sharded = compile_sharded(model, sgd(model), loss=loss_fn, mesh=mesh, policy=replace(EAGER, clip=0.3))
    mine = ours(sharded, row)
    reference = net(None)
    return {"eager": compare(mine, unsharded(reference, sgd(reference), 4, clip=0.3)),
            "copies": copies_equal(sharded, mesh), "plan": str(sharded.plan)}  # fmt: skip


if __name__ == "__main__":
    cases = {"2": (by_its_own_plan, stretches), "4": (derived, buffers, refusals), "8": (cube,)}
    named = [case for case in (generated,) if case.__name__ in sys.argv[2:]]
    answer_all(named or cases[os.environ["WORLD_SIZE"]], sys.argv[1])
