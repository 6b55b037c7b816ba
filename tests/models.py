"""Models that try to break the package, as values: a `Recipe` prints as the code that builds it again.

`recipes` is the hypothesis strategy; `build` makes model and optimizer, `batches` what they train on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import Policy

WORDS = 13  # vocabulary of `Model`
ROWS = 4  # examples in a rank's batch


class Linear(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class TiedInside(nn.Module):
    """One weight under two names of one unit."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class ReadTwice(nn.Module):
    """One weight read in two places, as it is and transposed."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


class Transposed(nn.Module):
    """Parameters that are dense, but not contiguous."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(hidden, width) / width).t())
        self.cube = nn.Parameter(torch.randn(width, 3, 2).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight).sum(-1, keepdim=True) * self.cube.sum((0, 2))


class Numbers(nn.Module):
    """0-d and one-element parameters, with an empty one between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.shift = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.nothing]) * self.gain + self.shift


class Normed(nn.Module):
    """Buffers that forward updates, an integer one among them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.norm(x))


class Dropped(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


class Mixed(nn.Module):
    """Parameters of three dtypes in one unit."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.randn(width, width) / width)
        self.double_ = nn.Parameter(torch.randn(width, width, dtype=torch.float64) / width)
        self.half_ = nn.Parameter(torch.randn(width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.single).double() @ self.double_
        return x.float() + self.half_.float()


class Unreached(nn.Module):
    """Holds a parameter, and a whole submodule, that the loss does not depend on."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width)
        self.idle = nn.Parameter(torch.randn(3))
        self.branch = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.branch(x)
        return self.used(x)


class Nested(nn.Module):
    """Blocks in a block, and parameters of its own around them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.inner = nn.ModuleList([Linear(width, hidden), Dropped(width, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.inner:
            x = x + block(x)
        return x


class Attention(nn.Module):
    """Three-dimensional weights and a batched product, on one sequence of examples."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, width, hidden) / width)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = torch.einsum("bw,kwh->kbh", x, self.qkv)
        return self.out(torch.softmax(query @ key.t(), -1) @ value)


BLOCKS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": Linear,
    "tied inside": TiedInside,
    "read twice": ReadTwice,
    "transposed": Transposed,
    "numbers": Numbers,
    "normed": Normed,
    "dropped": Dropped,
    "mixed": Mixed,
    "unreached": Unreached,
    "nested": Nested,
    "attention": Attention,
}
# Eager checkpointing runs forward twice, and would update a BatchNorm's statistics twice.
CHECKPOINTABLE = tuple(kind for kind in BLOCKS if kind != "normed")


@dataclass(frozen=True)
class Block:
    kind: str
    checkpoint: bool = False
    freeze: str = "none"  # or "first", its first parameter, or "all"


@dataclass(frozen=True)
class Recipe:
    """A model, its optimizer, and how they are sharded."""

    blocks: tuple[Block, ...]
    width: int = 5
    hidden: int = 7
    tied_head: bool = False
    tied_blocks: bool = False  # the first weights of equal shape in the first and the last block
    units: str = "default"
    groups: str = "one"  # or "two", by number of dims, or "some", which leaves biases to no optimizer
    optimizer: str = "sgd"
    policy: Policy = field(default_factory=lambda: Policy(lower="eager"))
    shard: int = 2
    replicate: int = 1


class Stack(nn.Module):
    """Equal layers and nothing else."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Model(nn.Module):
    """Embeds words, adds blocks, predicts words."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, recipe.width)
        self.blocks = nn.ModuleList(BLOCKS[block.kind](recipe.width, recipe.hidden) for block in recipe.blocks)
        self.head = nn.Linear(recipe.width, WORDS, bias=False)
        self.checkpointed = [block.checkpoint for block in recipe.blocks]
        if recipe.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block, checkpointed in zip(self.blocks, self.checkpointed, strict=True):
            x = x + (checkpoint(block, x, use_reentrant=False) if checkpointed else block(x))
        return self.head(x)


def loss(model: nn.Module, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words), targets)


def build(recipe: Recipe, seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Model(recipe)
    if recipe.tied_blocks:
        _tie(model.blocks[0], model.blocks[-1])
    for block, module in zip(recipe.blocks, model.blocks, strict=True):
        for index, parameter in enumerate(module.parameters()):
            if block.freeze == "all" or (block.freeze == "first" and index == 0):
                parameter.requires_grad_(False)
    return model, _optimizer(recipe, model)


def _tie(first: nn.Module, last: nn.Module) -> None:
    """Makes one parameter of the two first that have the same shape and dtype."""
    for name, parameter in first.named_parameters():
        for path, other in last.named_parameters():
            if parameter is not other and (parameter.shape, parameter.dtype) == (other.shape, other.dtype):
                for module_path, module in last.named_modules():
                    for key, value in list(module._parameters.items()):
                        if value is other and f"{module_path}.{key}".strip(".") == path:
                            module._parameters[key] = dict(first.named_parameters())[name]
                return


def _optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = {
        "one": [{"params": list(model.parameters())}],
        "two": [{"params": matrices, "lr": 0.2}, {"params": others, "weight_decay": 0.0}],
        "some": [{"params": matrices}],
    }[recipe.groups]
    if recipe.optimizer == "adamw":
        # With the usual eps the last bit of a near-zero gradient becomes a whole step.
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.01)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def units(recipe: Recipe) -> Any:
    """The argument ``units`` of `compile_sharded` that the recipe names."""
    choices: dict[str, Any] = {
        "default": None,
        "pattern": "blocks.*",
        "first": "blocks.0",
        "leaves": lambda name, module: next(module.children(), None) is None,
        "nested": lambda name, module: name.startswith("blocks."),
        "class": nn.Embedding,
    }
    return choices[recipe.units]


def batches(recipe: Recipe, steps: int, seed: int = 1) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """``[step][rank]``, other words for every one of them."""
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        words, targets = torch.randint(WORDS, (2, ROWS), generator=generator)
        return words, targets

    return [[batch() for _ in range(recipe.shard * recipe.replicate)] for _ in range(steps)]


@st.composite
def recipes(draw: st.DrawFn, shards: tuple[str, ...] = ("zero3", "zero2", "zero1", "ddp")) -> Recipe:
    kinds = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3))
    blocks = tuple(
        Block(
            kind,
            checkpoint=kind in CHECKPOINTABLE and draw(st.booleans()),
            freeze=draw(st.sampled_from(["none", "none", "first", "all"])),
        )
        for kind in kinds
    )
    shard, replicate = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]))
    placement = draw(st.sampled_from(shards))
    return Recipe(
        blocks,
        width=draw(st.sampled_from([1, 3, 5, 7])),
        hidden=draw(st.sampled_from([1, 2, 11])),
        tied_head=draw(st.booleans()),
        tied_blocks=len(blocks) > 1 and draw(st.booleans()),
        units=draw(st.sampled_from(["default", "pattern", "first", "leaves", "nested", "class"])),
        groups=draw(st.sampled_from(["one", "two", "some"])),
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        policy=Policy(
            shard=placement,
            reshard_onto=draw(st.sampled_from([None, 2])) if placement == "zero3" and shard != 3 else None,
            clip=draw(st.sampled_from([None, 0.5])),
            bucket_mb=draw(st.sampled_from([0, "auto", 0.0004, 0.001])),
            lower="eager",
        ),
        shard=shard,
        replicate=replicate,
    )
