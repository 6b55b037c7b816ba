"""Loops written for FSDP2, each run with its `fully_shard` and with this package's; what both leave, bit for bit.

torchrun --nproc-per-node 2 own_loop.py RESULT [CASE ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp_compiled as ours

WIDTH, VOCABULARY, LENGTH = 8, 16, 5


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.dropout, self.checkpointed = nn.Dropout(dropout), checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class GPT(nn.Module):
    def __init__(self, tie: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int, kind: str = "tokens") -> tuple[torch.Tensor, torch.Tensor]:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if kind == "tokens":
        shape = (2, LENGTH)
        return (torch.randint(VOCABULARY, shape, generator=generator),
                torch.randint(VOCABULARY, shape, generator=generator))  # fmt: skip
    return torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens, targets = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def gpt(api: Any, mark: dict[str, Any] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(**options)
    for layer in model.layers:
        api.fully_shard(layer, **(mark or {}))
    return api.fully_shard(model, **(mark or {}))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [_full(one) for one in model.state_dict().values()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if one.grad is None else _full(one.grad) for one in model.parameters()]


def _full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def train(model: nn.Module, optimizer: Any, steps: int = 3, loss: Callable[..., torch.Tensor] = loss_of) -> list[Any]:
    found: list[Any] = []
    for step in range(steps):
        value = loss(model, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.detach())
    return [*found, *weights(model)]


def squares(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, "rows")[0]).square().mean()


# The loops.


def adamw(api: Any) -> Any:
    model = gpt(api)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def sgd_groups(api: Any) -> Any:
    """Groups by the number of dims; momentum; a scheduler; the norm clipped."""
    model = gpt(api)
    flat = [one for one in model.parameters() if one.ndim < 2]
    wide = [one for one in model.parameters() if one.ndim >= 2]
    optimizer = torch.optim.SGD([{"params": flat}, {"params": wide, "weight_decay": 0.1}], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    found: list[Any] = [len(flat), len(wide)]
    for step in range(3):
        loss_of(model, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        found.append(_full(norm))
    return [*found, *weights(model)]


def fused(api: Any) -> Any:
    model = gpt(api, tie=True)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


def accumulate(api: Any) -> Any:
    """With communication in each backward, then without."""
    model = gpt(api)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for row in range(4):
        for micro in range(3):
            model.set_requires_gradient_sync(row % 2 == 0 or micro == 2)
            model.set_is_last_backward(micro == 2)
            (loss_of(model, 3 * row + micro) / 3).backward()
            found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *weights(model)]


def evaluation(api: Any) -> Any:
    """Forward without gradients between steps, and dropout from the user's generator."""
    model = gpt(api, dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5 + dist.get_rank())
    found: list[Any] = []
    for step in range(3):
        found += train(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            found.append(model(batch(step)[0]))
        with torch.inference_mode():
            found.append(model(batch(step)[0]).clone())
        model.train()
        found.append(torch.rand(2))
    return found


def checkpointed(api: Any) -> Any:
    model = gpt(api, checkpointed=True, dropout=0.2)
    torch.manual_seed(5 + dist.get_rank())
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def several_forwards(api: Any) -> Any:
    """Preference loss: two forwards, one backward; then one forward, two backwards."""
    model = gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(2):
        chosen, rejected = loss_of(model, step), loss_of(model, step + 50)
        F.softplus(chosen - rejected).backward()
        found += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    loss = loss_of(model, 9)
    loss.backward(retain_graph=True)
    loss.backward()
    return [*found, *gradients(model)]


def frozen(api: Any) -> Any:
    """The embedding and one block are frozen, before the model is sharded; another part is frozen and thawed later."""
    torch.manual_seed(0)
    model = GPT()
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    for layer in model.layers:
        api.fully_shard(layer)
    api.fully_shard(model)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    found = train(model, optimizer, 2)
    model.layers[1].up.requires_grad_(False)
    loss_of(model, 7).backward()
    return [*found, *gradients(model)]


class Adapter(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.b(self.a(x))


def adapters(api: Any) -> Any:
    torch.manual_seed(0)
    model = GPT().requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = Adapter(layer.up), Adapter(layer.down)  # type: ignore[assignment]
        api.fully_shard(layer)
    api.fully_shard(model)
    return train(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2))


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    length: int
    loss: torch.Tensor | None = None


class Structured(nn.Module):
    """Gives a structure back, takes one, and has a part that is not used and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, given: dict[str, torch.Tensor], scale: float = 1.0) -> Any:
        x = self.norm(self.one(given["x"]) * scale)
        y = self.two(x)
        return {"y": y, "pair": (x, x.argmax(-1)), "scale": scale, "same": given["x"]}


def structured(api: Any) -> Any:
    torch.manual_seed(0)
    model = api.fully_shard(Structured())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(3):
        x, y = batch(step, "rows")
        x.requires_grad_()
        out = model({"x": x}, scale=2.0)
        (F.mse_loss(out["y"], y) + out["pair"][0].sum() * 0.1).backward()
        found += [out["pair"][1], out["scale"], x.grad, *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *weights(model)]


def adversarial(api: Any) -> Any:
    """Two models that are trained against each other, one through the other."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    judge = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
    for model in (maker, judge):
        api.fully_shard(model)
    first = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.9))
    second = torch.optim.Adam(judge.parameters(), lr=1e-2, betas=(0.5, 0.9))
    found: list[Any] = []
    for step in range(3):
        noise, real = batch(step, "rows")
        second.zero_grad()
        made = maker(noise)
        one = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        one.backward()
        second.step()
        first.zero_grad()
        two = F.softplus(-judge(made)).mean()
        two.backward()
        first.step()
        found += [one.detach(), two.detach(), *gradients(judge)]
    return [*found, *weights(maker), *weights(judge)]


def autocast(api: Any) -> Any:
    model = gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, step)

    return train(model, optimizer, 2, loss)


def mixed_precision(api: Any) -> Any:
    torch.manual_seed(0)
    model = GPT()
    for layer in model.layers:
        api.fully_shard(layer, mp_policy=theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    precision = theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    api.fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, optimizer, 2)
    model.set_requires_gradient_sync(False)
    loss_of(model, 5).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 6).backward()
    return [*found, *gradients(model)]


def scaler(api: Any) -> Any:
    """`torch.amp.GradScaler`, with an infinity on one rank in the second step."""
    model = gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    found: list[Any] = []
    for step in range(3):
        loss = loss_of(model, step)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [scaler.get_scale(), *weights(model)]
    return found


def nested(api: Any) -> Any:
    """Units inside of units, one parameter shared by two of them, and the root kept gathered."""
    torch.manual_seed(0)
    model = GPT()
    for layer in model.layers:
        api.fully_shard(layer.up)
        api.fully_shard(layer, reshard_after_forward=False)
    api.fully_shard(model, reshard_after_forward=True)
    model.layers[0].set_reshard_after_forward(True)  # type: ignore[operator]
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def uneven(api: Any) -> Any:
    """Fewer rows than ranks, and numbers of rows that the ranks do not divide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0), nn.Linear(3, 7))
    api.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shapes = [tuple(one.to_local().shape) for one in model.parameters()]
    placements = [str(one.placements) for one in model.parameters()]
    return [shapes, placements, *train(model, optimizer, loss=squares)]


def meta(api: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH))
    api.fully_shard(model[0])
    api.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model:
        module.reset_parameters()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, optimizer, 2, squares)


def saved(api: Any) -> Any:
    """Checkpoints: a state_dict, DCP, and a full one from rank 0; EMA beside it."""
    model = gpt(api)
    average = gpt(api)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, optimizer, 2)
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.25)
    found += weights(average)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state = {"model": model.state_dict(), "optimizer": dcp_state.get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder[0])
    again = gpt(api)
    with torch.no_grad():
        for one in again.parameters():
            one.zero_()
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    state = {"model": again.state_dict(), "optimizer": dcp_state.get_optimizer_state_dict(again, optimizer)}
    dcp.load(state, checkpoint_id=folder[0])
    dcp_state.set_optimizer_state_dict(again, optimizer, state["optimizer"])
    found += train(again, optimizer, 1)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = dcp_state.get_model_state_dict(model, options=dcp_state.StateDictOptions(full_state_dict=True))
    dcp_state.set_model_state_dict(average, full, options=options)
    return [*found, *weights(average), *(value.detach().clone() for value in full.values())]


def assigned(api: Any) -> Any:
    """The way of PyTorch's tutorial: full tensors are distributed and take the parameters' places."""
    torch.manual_seed(7)
    full = {name: value.clone() for name, value in GPT().state_dict().items()}
    model = gpt(api)
    loss = loss_of(model, 0).detach()
    sharded = {
        name: nn.Parameter(distribute_tensor(full[name], one.device_mesh, one.placements))
        for name, one in model.state_dict().items()
    }
    model.load_state_dict(sharded, assign=True)
    return [loss, *train(model, torch.optim.SGD(model.parameters(), lr=0.1))]


def written(api: Any) -> Any:
    """Weights are clamped, initialised and copied between steps."""
    model = gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = train(model, optimizer, 1)
    with torch.no_grad():
        for one in model.parameters():
            one.clamp_(-0.1, 0.1)
        model.head.weight.mul_(2.0)
    torch.manual_seed(1)
    nn.init.normal_(model.embed.weight, std=0.1)
    nn.init.zeros_(model.layers[0].up.bias)
    return [*found, *train(model, optimizer, 2)]


def hooks(api: Any) -> Any:
    """Hooks of the root and of a block, and on outputs."""
    model = gpt(api)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].sum()))
    model.register_forward_hook(lambda _, args, result: result * 0.5)
    model.layers[0].register_forward_hook(lambda _, args, result: result + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, targets = batch(step)
        logits = model(tokens)
        logits.register_hook(lambda gradient: gradient * 2)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *weights(model)]


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.into(x))

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.out(code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def methods(api: Any) -> Any:
    """Other methods than forward, the modules of a list, and blocks alone, under a root that is not sharded."""
    torch.manual_seed(0)
    model = api.fully_shard(Coder())
    api.register_fsdp_forward_method(model, "encode")
    api.register_fsdp_forward_method(model, "decode")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(2):
        x, y = batch(step, "rows")
        (F.mse_loss(model.decode(model.encode(x)), y) + model(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += weights(model)
    torch.manual_seed(0)
    plain = GPT()
    for layer in plain.layers:
        api.fully_shard(layer)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    return [*found, *train(plain, optimizer, 2)]


def held_by_methods(api: Any) -> Any:
    """One method runs without synchronisation, another with it; what is held back is a parameter's."""
    torch.manual_seed(0)
    model = api.fully_shard(Coder())
    api.register_fsdp_forward_method(model, "encode")
    x, y = batch(0, "rows")
    model.set_requires_gradient_sync(False)
    model.encode(x).square().sum().backward()
    found = gradients(model)
    model.set_requires_gradient_sync(True)
    F.mse_loss(model(x), y).backward()
    return [*found, *gradients(model)]


def ignored(api: Any) -> Any:
    torch.manual_seed(0)
    model = GPT()
    api.fully_shard(model, ignored_params={model.head.weight})
    found = train(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), 2)
    return [isinstance(model.head.weight, DTensor), *found]


def unsharded(api: Any) -> Any:
    model = gpt(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = train(model, optimizer, 1)
    model.unshard()
    handle = model.layers[0].unshard(async_op=True)  # type: ignore[operator]
    handle.wait()
    found += [model.head.weight.detach().clone(), model.layers[0].up.weight.detach().clone()]
    found.append(isinstance(model.head.weight, DTensor))
    model.reshard()
    model.layers[0].reshard()  # type: ignore[operator]
    found.append(isinstance(model.head.weight, DTensor))
    return [*found, *train(model, optimizer, 1)]


def hybrid(api: Any) -> Any:
    """Two replicas of one rank each, and one of two."""
    found: list[Any] = []
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        model = gpt(api, {"mesh": mesh})
        found += train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 2)
        found.append(str(model.head.weight.placements))
    return found


def around(api: Any) -> Any:
    """`torch.utils.checkpoint` around the model, and activations that are kept elsewhere."""
    model = gpt(api)
    tokens, targets = batch(0)
    logits = checkpoint(model, tokens, use_reentrant=False)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    found = gradients(model)
    model.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, 1)
    loss.backward()
    return [*found, *gradients(model)]


CASES: dict[str, Callable[[Any], Any]] = {
    case.__name__: case
    for case in (
        adamw, sgd_groups, fused, accumulate, evaluation, checkpointed, several_forwards, frozen, adapters, structured,
        adversarial, autocast, mixed_precision, scaler, nested, uneven, meta, saved, assigned, written, hooks, methods,
        held_by_methods, ignored, unsharded, hybrid, around,
    )
}  # fmt: skip


def different(one: Any, two: Any) -> str:
    """Where two results part; empty where they are the same."""
    if len(one) != len(two):
        return f"{len(one)} results and {len(two)}"
    for place, (left, right) in enumerate(zip(one, two, strict=True)):
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            if left.dtype != right.dtype or not torch.equal(left, right):
                off = (left.double() - right.double()).abs().max().item() if left.shape == right.shape else "shape"
                kinds = f"{list(left.shape)} {left.dtype} and {list(right.shape)} {right.dtype}"
                return f"result {place}, {kinds}: off by {off}"
        elif type(left) is not type(right) or left != right:
            return f"result {place}: {left} and {right}"
    return ""


def broken(api: Any) -> Any:
    """Trains with another rate under this package: what must be told apart."""
    model = gpt(api)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1 if api is theirs else 0.1000001))


def main(result: str, names: list[str]) -> None:
    found: dict[str, str] = {}
    for name in names or [*CASES, "broken"]:
        case = broken if name == "broken" else CASES[name]
        try:
            found[name] = different(case(theirs), case(ours))
        except Exception:
            found[name] = traceback.format_exc()[-3000:]
            if "--all" not in sys.argv:
                print(found[name], file=sys.stderr, flush=True)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found[name])
        found[name] = next((f"rank {rank}: {one}" for rank, one in enumerate(everyone) if one), "")
        if dist.get_rank() == 0:
            print(name, "ok" if not found[name] else found[name][:200], flush=True)
    if dist.get_rank() == 0:
        with open(result, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1], sys.argv[2:])
    dist.destroy_process_group()
