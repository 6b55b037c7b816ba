"""Views of views are one view, of the same elements in the same memory, however what they view lies there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture import folded_views
from fsdp_compiled.capture.folded_views import DETACH, TURNS, VIEWS, fold_views

aten = torch.ops.aten
SIZES = (2, 3, 4, 6)


def viewed(node: fx.Node, draw: random.Random) -> fx.Node:
    """Some view of the node, as a kernel that lays its results out in order would allow it."""
    value = node.meta["val"]
    sizes, rank = list(value.shape), value.dim()
    kind = draw.choice(["split", "split", "merge", "merge", "transpose", "permute", "slice", "expand", "detach"])
    target: Any = aten.view.default
    if kind == "split":
        place = draw.randrange(rank)
        part = draw.choice([one for one in range(1, sizes[place] + 1) if sizes[place] % one == 0])
        sizes[place : place + 1] = [part, sizes[place] // part]
        args: tuple[Any, ...] = (sizes,)
    elif kind == "merge" and rank > 1:
        place = draw.randrange(rank - 1)
        sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
        args = (sizes,)
    elif kind == "transpose" and rank == 2:
        target, args = aten.t.default, ()
    elif kind == "transpose":
        target, args = aten.transpose.int, (draw.randrange(rank), -draw.randrange(1, rank + 1))
    elif kind == "permute":
        target, args = aten.permute.default, (draw.sample(range(rank), rank),)
    elif kind == "slice":
        target, args = aten.slice.Tensor, (draw.randrange(rank), 0, 2**63 - 1)
    elif kind == "expand":
        target, args = aten.expand.default, (sizes,)
    else:
        target, args = DETACH, ()
    try:
        made = target(value, *args)
    except RuntimeError:  # no view of this
        return viewed(node, draw)
    found = node.graph.call_function(target, (node, *args))
    found.meta["val"] = made
    return found


def graph_of(seed: int) -> fx.Graph:
    """A tensor, and views of it and of these, some of which are returned."""
    draw, graph = random.Random(seed), fx.Graph()
    nodes = [graph.placeholder("x")]
    nodes[0].meta["val"] = torch.empty(tuple(draw.choices(SIZES, k=3)), device="meta")
    for _ in range(8):
        nodes.append(viewed(draw.choice(nodes[-2:]), draw))
    graph.output(tuple(draw.sample(nodes[1:], 3)))
    return graph


def results(graph: fx.Graph, x: torch.Tensor, unread: set[fx.Node]) -> list[Any]:
    """What each result is: its elements, and where they lie. Views are reshapes, as the pass `reshape` makes them."""
    known = {graph.find_nodes(op="placeholder")[0]: x}
    for node in graph.find_nodes(op="placeholder")[0].graph.nodes:
        if node.op == "call_function" and node not in unread:
            target = aten.reshape.default if node.target is aten.view.default else node.target
            known[node] = target(*fx.node.map_arg(node.args, known.__getitem__))
    found = [known[node] for node in graph.output_node().args[0]]  # type: ignore[union-attr]
    strides = [[step for step, size in zip(one.stride(), one.shape, strict=True) if size > 1] for one in found]
    same = [one.data_ptr() == x.data_ptr() for one in found]
    return [([*one.shape], one.flatten().tolist(), *rest) for one, *rest in zip(found, strides, same, strict=True)]


def different(seeds: range) -> int:
    """In how many graphs a result is another, where what is viewed lies as nobody thought."""
    count = 0
    for seed in seeds:
        graph, folded = graph_of(seed), graph_of(seed)
        unread = fold_views(folded)
        sizes = graph.find_nodes(op="placeholder")[0].meta["val"].shape
        order = random.Random(seed).sample(range(3), 3)
        x = torch.arange(sizes.numel()).view([sizes[dim] for dim in order])
        x = x.permute([order.index(dim) for dim in range(3)])
        count += results(graph, x, set()) != results(folded, x, unread)
    return count


def test_the_elements_and_where_they_lie_are_the_same() -> None:
    assert different(range(120)) == 0
    folded = [(graph := graph_of(seed), fold_views(graph)) for seed in range(120)]
    assert sum(len(unread) for _, unread in folded) > 120


def test_control_sizes_that_are_not_split_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_views, "_splits", lambda fine, coarse: bool(fine and coarse))
    assert different(range(120)) > 0


class Model(nn.Module):
    """Views of views: within a block, of what is returned, and of a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).view(2, 5, 2, 3).view(2, 5, 6).transpose(0, 1).transpose(0, 1)
        self.seen.t().t().copy_(y.detach()[0, :1].view(1, 2, 3).view(2, 3))
        return self.down(F.softplus(y.permute(2, 0, 1)).permute(1, 2, 0))


def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = model(x)
    return y.transpose(0, 2).transpose(0, 2).square().mean(), y


def test_a_step_is_that_of_pytorch_with_no_view_of_a_view() -> None:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (plain, model)]
    sharded = compile_sharded(model, optimizers[1], loss=loss, policy=Policy(lower="eager"))
    for _ in range(3):
        x = torch.randn(2, 5, 4)
        optimizers[0].zero_grad()
        wanted, result = loss(plain, x)
        wanted.backward()
        optimizers[0].step()
        found, aux = sharded.step(x)
        assert torch.equal(found, wanted) and torch.equal(aux, result)
    assert all(map(torch.equal, sharded.full_state_dict().values(), plain.state_dict().values()))
    own = [node for node in sharded.program.graph.nodes if "mark" not in node.meta and node.op == "call_function"]
    of_views = [(node.target, node.args[0].target) for node in own if isinstance(node.args[0], fx.Node)]
    both = (aten.reshape.default, *VIEWS)
    assert not [pair for pair in of_views if {*pair} <= {*both} or pair == (aten.t.default, aten.t.default)]
    assert any(one in TURNS for one, _ in of_views)
