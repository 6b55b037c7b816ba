"""`fully_shard` after `parallelize_module`, in a loop of one's own, on 2 x 2 ranks: beside FSDP2 with the same plan.

torchrun --nproc-per-node 4 tensor_parallel_loop.py RESULT [CASE ...]
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as of_torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from fsdp_compiled import Policy
from fsdp_compiled import fully_shard as of_ours
from tests.cut_models import ScaledNet, adamw, batch, build, cut, net, told_when_stale, whole
from tests.launch import answer_all, of_all, told

warnings.filterwarnings("ignore")
RANK = int(os.environ.get("RANK", 0))
STEPS = 3


def train(
    model: nn.Module,
    row: int,
    clip: float | None = None,
    classes: bool = False,
    microbatches: int = 1,
    evaluate: bool = False,
) -> dict[str, Any]:
    """The user's own loop on two rows: losses, norms, weights, and what evaluation gives after it, if asked."""
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(STEPS):
        for part in range(microbatches):
            if microbatches > 1:
                model.set_requires_gradient_sync(part == microbatches - 1)  # type: ignore[operator]
            tokens, targets = batch(step, row + part * 2)
            with loss_parallel() if classes else contextlib.nullcontext():
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()) / microbatches
                loss.backward()
            losses.append(whole(loss).item())
        if clip is not None:
            norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    if evaluate:
        model.eval()
        with torch.no_grad():
            weights["logits"] = whole(model(batch(9, row)[0]))
    return {"losses": losses, "norms": norms, "weights": weights}


def bits(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs, by name; nothing where all is the same to the bit."""
    odd = [name for name, value in other["weights"].items() if not torch.equal(one["weights"][name], value)]
    return odd + [what for what in ("losses", "norms") if one[what] != other[what]]


def sharded(fully_shard: Any, model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def sequence() -> Any:
    """Sequence parallelism, a tie, AdamW, clipping."""
    mesh = two_by_two()
    row = mesh["dp"].get_local_rank()
    mine, other = (sharded(f, cut(build(), mesh["tp"], sequence=True), mesh["dp"]) for f in (of_ours, of_torch))
    specs = [
        {name: str((p.placements, p.device_mesh.shape)) for name, p in m.named_parameters()} for m in (mine, other)
    ]
    found = train(mine, row, clip=0.3)
    mine.unshard()
    inside = mine.tokens.weight
    gathered = torch.equal(inside.full_tensor(), found["weights"]["tokens.weight"]), str(inside.placements)
    mine.reshard()
    return {
        "odd": bits(found, train(other, row, clip=0.3)), "losses": found["losses"],
        "specs": specs[0] == specs[1], "unsharded": gathered,
    }  # fmt: skip


def half() -> Any:
    """Bfloat16 on replicas, two microbatches of which one is not synchronised."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    data = mesh["dp_replicate", "dp_shard"]
    row = mesh["dp_replicate"].get_local_rank()
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    mine, other = (sharded(f, net(mesh["tp"]), data, **options) for f in (of_ours, of_torch))
    return {"odd": bits(train(mine, row, microbatches=2), train(other, row, microbatches=2))}


def classes() -> Any:
    """Loss parallel in the loop, and clipping of parameters that are cut, and of some that no plan names."""
    mesh = two_by_two()
    row = mesh["dp"].get_local_rank()
    model = sharded(of_ours, net(mesh["tp"], classes=True), mesh["dp"])
    placements = {name: str(p.placements) for name, p in model.named_parameters()}
    found = train(model, row, clip=0.3, classes=True)
    reference = net(None)
    optimizer = adamw(reference)
    losses, norms, twice = [], [], 0.0
    for step in range(STEPS):
        own = [F.cross_entropy(reference(x).flatten(0, 1), y.flatten()) for x, y in (batch(step, 0), batch(step, 1))]
        (sum(own) / 2).backward()  # type: ignore[union-attr]
        if not step:  # what is whole on both ranks along tp, counted twice
            split = ("up.weight", "up.bias", "down.weight", "head.weight", "head.bias")
            squares = [(p.grad.square().sum().item(), name in split) for name, p in reference.named_parameters()]
            twice = sum(square * (1 if part else 2) for square, part in squares) ** 0.5
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(own[row].item())
    return {"losses": far(found["losses"], losses), "norms": far(found["norms"], norms), "first": norms[0],
            "twice": twice, "placements": placements}  # fmt: skip


def verified() -> Any:
    """Calls held against eager PyTorch, of which the second's derivative is another; the control looks at forward."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for gradients in (True, False):
        policy = Policy(lower="eager", verify=1, verify_gradients=gradients)
        model = sharded(of_ours, net(mesh["tp"], kind=ScaledNet), mesh["dp"], policy=policy)

        def call(step: int, model: Any = model) -> None:
            tokens, targets = batch(step, 0)
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()

        found[str(gradients)] = told_when_stale(call)
    return found


class Dropped(nn.Module):
    """Dropout of what all ranks along tp have, and, where ``parts``, of the hidden units that each has a part of."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        self.net, self.parts = net(None, dropout=0.25), parts

    def forward(self, tokens: torch.Tensor, masks: bool = False) -> Any:
        own = self.net
        x = own.tokens(tokens)
        hidden = F.gelu(own.up(x))
        if self.parts:
            hidden = F.dropout(hidden, 0.25, self.training)
        logits = own.head(x + own.drop(own.down(hidden)))
        if not masks:
            return logits
        part = own.up(torch.ones(1, 1, x.shape[-1])).flatten()[:16].expand(4, 16)
        return logits, F.dropout(torch.ones(4, 64), 0.5) > 0, F.dropout(part, 0.5) != 0


def dropped(fully_shard: Any, mesh: DeviceMesh, parts: bool) -> Any:
    torch.manual_seed(0)
    model = Dropped(parts)
    plan = {"net.up": ColwiseParallel(), "net.down": RowwiseParallel()}
    return sharded(fully_shard, parallelize_module(model, mesh["tp"], plan), mesh["dp"])


def dropout() -> Any:
    """Bit for bit FSDP2 where all ranks along tp drop the same; of parts, masks of their own, where FSDP2 repeats."""
    mesh = two_by_two()
    row = mesh["dp"].get_local_rank()
    runs, masks = [], []
    for shard in (of_ours, of_torch):
        model = dropped(shard, mesh, parts=False)
        torch.manual_seed(10 + row)  # alike along tp
        runs.append(train(model, row, evaluate=True))
        model.train()
        calls = []
        for _ in range(2):
            with torch.no_grad():
                calls.append([mask.flatten().tolist() for mask in model(batch(0, row)[0], masks=True)[1:]])
        found = of_all(calls)
        masks.append(found)
    model = dropped(of_ours, mesh, parts=True)
    torch.manual_seed(10 + row)
    again = train(model, row)
    copies = [model.net.tokens.weight.to_local(), model.net.head.weight.to_local()]
    others = of_all([one.tolist() for one in copies])
    torch.manual_seed(RANK)
    model.train()
    before = [p.to_local().clone() for p in model.parameters()]
    seeds = told(lambda: model(batch(0, row)[0]).square().mean().backward())
    return {
        "odd": bits(*runs), "masks": masks, "losses": again["losses"], "without": runs[0]["losses"],
        "copies": others[RANK] == others[RANK ^ 1], "seeds": seeds,
        "unchanged": all(map(torch.equal, before, [p.to_local() for p in model.parameters()])),
    }  # fmt: skip


def far(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def refusals() -> Any:
    mesh = two_by_two()
    tp, dp, row = mesh["tp"], mesh["dp"], mesh["dp"].get_local_rank()
    tokens, _ = batch(0, row)
    crossed = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))

    def backward(model: nn.Module, given: torch.Tensor = tokens) -> None:
        model(given).square().mean().backward()

    def with_weight(weight: torch.Tensor) -> nn.Module:
        model = net(tp)
        model.drop.scale = nn.Parameter(weight)  # type: ignore[assignment]
        return model

    def parted() -> nn.Module:
        model = net(tp)
        parallelize_module(model, tp, {"head": ColwiseParallel()})
        return model

    def buffered() -> nn.Module:
        model = net(tp)
        model.register_buffer("table", distribute_tensor(torch.ones(4), tp, [Replicate()]))
        return model

    def untied() -> nn.Module:
        """As a model of transformers whose config ties the head to the embedding."""
        model: Any = parted()
        model.config = SimpleNamespace(tie_word_embeddings=True)
        model.get_input_embeddings, model.get_output_embeddings = lambda: model.tokens, lambda: model.head
        return model

    found = {}
    model = sharded(of_ours, net(tp), dp)
    backward(model)
    before = [p.to_local().clone() for p in model.parameters()]
    other = tokens.flip(0) if RANK == 3 else tokens
    found["other batches"] = told(lambda: backward(model, other))
    backward(model)  # all go on
    found["unchanged"] = all(map(torch.equal, before, [p.to_local() for p in model.parameters()]))
    found["parts"] = told(lambda: backward(sharded(of_ours, parted(), dp)))
    found["input"] = told(lambda: backward(sharded(of_ours, net(tp), dp), distribute_tensor(tokens, tp, [Replicate()])))
    found["no mesh"] = told(lambda: of_ours(net(tp)))
    found["other mesh"] = told(lambda: of_ours(net(crossed), mesh=dp))
    found["partial"] = told(lambda: of_ours(with_weight(DTensor.from_local(torch.ones(4), tp, [Partial()])), mesh=dp))
    found["uneven"] = told(lambda: of_ours(with_weight(distribute_tensor(torch.ones(17), tp, [Shard(0)])), mesh=dp))
    found["buffer"] = told(lambda: of_ours(buffered(), mesh=dp))
    found["broken tie"] = told(lambda: of_ours(untied(), mesh=dp))
    found["dynamic"] = told(lambda: of_ours(net(tp), mesh=dp, policy=Policy(dynamic=True)))
    left = net(tp)
    told(lambda: of_ours(left, mesh=dp, policy=Policy(dynamic=True)))
    found["as it was"] = all(p.device_mesh.ndim == 1 for p in left.parameters() if isinstance(p, DTensor))
    return found


CASES = (sequence, dropout, refusals)
MORE = (verified, half, classes)


if __name__ == "__main__":
    answer_all([case for case in MORE if case.__name__ in sys.argv[2:]] or CASES, sys.argv[1])
