"""Models of equal blocks, and of blocks that are not quite equal, captured on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from fsdp_compiled.capture.captured import Capture, Tensors
from fsdp_compiled.capture.dynamo import trace_whole
from fsdp_compiled.ir.nodes import fake_tensor
from fsdp_compiled.ir.program import Program

LAYERS, WIDTH = 6, 8


class Block(nn.Module):
    """Two residual branches; ``like``: what is special about it."""

    def __init__(self, like: str, index: int) -> None:
        super().__init__()
        self.like, self.index = like, index
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> Any:
        y = F.gelu(self.up(self.norm(x))) * self.scale
        if self.like == "dropout":
            y = F.dropout(y, 0.1)
        if self.like == "index":
            y = y * (self.index + 1)
        if self.like == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                y = self.gate(y).float()
        if self.like == "begins with nothing":
            y = torch.cat([torch.tensor([], dtype=y.dtype, device=y.device), y.flatten(), torch.tensor([])]).view_as(y)
        if self.like == "counts":
            self.count.add_(1)
            y = y * self.count
        if self.like == "a literal in each":
            y = y * torch.tensor([0.5] * WIDTH)
        for one in shared:
            y = y * one + self.gate(one)
        if self.like == "tuple":
            return x + y, y
        if self.like == "in place":
            y += x
            return y
        return x + y


class Model(nn.Module):
    def __init__(self, like: str = "", layers: int = LAYERS, odd: int | None = None) -> None:
        super().__init__()
        self.like = like
        self.embedding = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Block("index" if index == odd else like, index) for index in range(layers))
        self.shared = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        if like == "tied":
            self.head.weight = self.embedding.weight
        if like == "frozen":
            for layer in self.layers[:3]:
                layer.requires_grad_(False)
            self.embedding.requires_grad_(False)
        if like == "one frozen inside":
            for layer in self.layers:
                layer.up.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.like == "literals":
            x = x * torch.tensor([0.5] * WIDTH)
        shared = {"shared": (self.shared, x.sin()), "rotary": (torch.arange(WIDTH).cos(),)}.get(self.like, ())
        seen = []
        masks = (x.detach().sin(), x.detach().cos()) if self.like in ("takes turns", "no round", "one mask") else ()
        for index, layer in enumerate(self.layers):
            if self.like == "takes turns":
                shared = (masks[index % 2],)
            if self.like == "no round":
                shared = (masks[index in (3, 8)],)
            if self.like == "one mask":
                shared = (masks[int(index == 7)],)
            if self.like == "checkpointed":
                x = checkpoint(layer, x, use_reentrant=False)
            elif self.like == "tuple":
                x, y = layer(x, *shared)
                seen.append(y)
            else:
                x = layer(x, *shared)
            if self.like == "around":
                x = F.layer_norm(x, (WIDTH,)) * 2
            if self.like == "hidden states":
                seen.append(x)
        if self.like == "hidden states":
            x = x + torch.stack(seen).mean(0)
        if self.like == "literals":
            x = x + torch.tensor([0.25] * WIDTH)
        return self.head(x)


class TwoLists(nn.Module):
    """An encoder, and a decoder that reads what it made in each of its blocks. ``one``: they read the same, too."""

    def __init__(self, one: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.one = one
        self.encoder = nn.ModuleList(Block("", index) for index in range(layers))
        self.decoder = nn.ModuleList(Block("", index) for index in range(layers + 1))
        self.embedding, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = y = self.embedding(tokens)
        if not self.one:
            y = self.embedding(tokens)
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y, x)
        return self.head(y)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def program_of(model: nn.Module, function: Any = loss, gradient: bool = True) -> Program:
    return captured(model, function, gradient).program


def captured(model: nn.Module, function: Any = loss, gradient: bool = True) -> Capture:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in made:
            return made[id(tensor)]
        value = fake_tensor(mode, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
        made[id(tensor)] = value
        return value

    parameters = {name: fake(value) for name, value in model.named_parameters(remove_duplicate=False)}
    buffers = {name: fake(value) for name, value in model.named_buffers()}
    batch = (fake(torch.zeros(2, 3, dtype=torch.long)),)
    return trace_whole(model, function, Tensors(parameters, buffers), batch, {}, gradient=gradient)
