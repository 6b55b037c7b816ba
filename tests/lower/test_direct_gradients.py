"""Products that write a gradient where it is sent from: the same numbers bit for bit, and where they are left alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import Plan, Policy, Sharded, compile_sharded
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.ir.program import Program
from fsdp_compiled.kernels.aten_operators import product_
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.lower import fusions
from fsdp_compiled.lower.fusions.flatten_gradients import direct_gradients, write
from fsdp_compiled.lower.inductor import chooses_products
from fsdp_compiled.lower.lowering import Lowering
from tests.allocator import record
from tests.chosen import chosen

aten = torch.ops.aten
flatten, flatten_ = operators.flatten.default, operators.flatten_.default


# The operator.

LAYOUTS = st.sampled_from(["plain", "transposed", "sliced", "repeated"])


def laid(batch: tuple[int, ...], rows: int, columns: int, how: str) -> Tensor:
    if how == "transposed":
        return torch.randn(*batch, columns, rows).transpose(-1, -2)
    if how == "sliced":
        return torch.randn(*batch, rows, columns + 3)[..., 1 : 1 + columns]
    if how == "repeated":
        return torch.randn(*batch, 1, columns).expand(*batch, rows, columns)
    return torch.randn(*batch, rows, columns)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.sampled_from([(), (1,), (3,)]),
    m=st.integers(1, 40), k=st.integers(0, 40), n=st.integers(1, 40), left=LAYOUTS, right=LAYOUTS,
    offset=st.sampled_from([0, 32, 64]), behind=st.integers(0, 9),
)  # fmt: skip
def test_a_product_is_written_at_its_place_and_nowhere_else(
    batch: tuple[int, ...], m: int, k: int, n: int, left: str, right: str, offset: int, behind: int
) -> None:
    a, b = laid(batch, m, k, left), laid(batch, k, n, right)
    expected = (a @ b).reshape(-1)
    flat = torch.full((offset + expected.numel() + behind,), 7.0)
    flat[offset : offset + expected.numel()] = float("nan")
    product_(flat, offset, a, b)
    assert torch.equal(flat[offset : offset + expected.numel()], expected)
    assert (flat[:offset] == 7).all() and (flat[offset + expected.numel() :] == 7).all()


def test_it_is_a_sound_operator() -> None:
    torch.library.opcheck(product_, (torch.ones(90), 3, torch.randn(5, 7), torch.randn(9, 7).t()))
    torch.library.opcheck(product_, (torch.ones(90), 0, torch.randn(2, 5, 7), torch.randn(2, 7, 3)))


# The rewrite.


def traced(function: Callable[..., Any], *given: Tensor, symbolic: bool = False) -> fx.Graph:
    mode = FakeTensorMode()
    if symbolic:
        graph: fx.Graph = make_fx(function, tracing_mode="symbolic")(*given).graph
    else:
        with mode:
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]
            graph = make_fx(function)(*fakes).graph
    for node in graph.find_nodes(op="call_function", target=flatten):
        node.meta["mark"] = Mark("flatten", "unit", "buffer")
    for node in graph.nodes:
        node.meta.setdefault("val", None)
        node.meta.setdefault("phase", "backward")
    return graph


def counts(graph: fx.Graph) -> Counter[Any]:
    write(graph)
    graph.lint()
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


def one(a: Tensor, b: Tensor) -> Tensor:
    return operators.flatten([(a @ b).mT.mT], [0], 6400, a.dtype)


A, B = torch.randn(64, 32), torch.randn(32, 80)


def test_what_the_rest_is_told() -> None:
    def unit(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return operators.flatten([bias, a @ b, bias, b.t() @ a.t()], [0, 64, 6000, 7040], 12800, a.dtype)

    graph = traced(unit, A, B, torch.randn(48))
    assert counts(graph) == {
        aten.empty.memory_format: 1, aten.slice.Tensor: 1, aten.t.default: 2, product_: 2, flatten_: 1
    }  # fmt: skip
    (call,) = graph.find_nodes(op="call_function", target=flatten_)
    assert [list(call.args[index]) for index in (2, 3)] == [[0, 6000], [64, 64 + 5120, 7040, 7040 + 5120]]
    places = [node.args[1] for node in graph.find_nodes(op="call_function", target=product_)]
    assert places == [0, 7040 - 64], "as seen from the first of the block's"
    fx.GraphModule(nn.Module(), graph)  # which compiles its text
    bias = torch.randn(48)
    expected = unit(A, B, bias)
    assert torch.equal(fx.GraphModule(nn.Module(), graph)(A, B, bias), expected)


@pytest.mark.parametrize(
    ("why", "function", "given"),
    [
        ("cast on the way", lambda a, b: operators.flatten([a @ b], [0], 6400, torch.bfloat16), (A, B)),
        ("scaled", lambda a, b: operators.flatten([a @ b], [0], 6400, a.dtype, a.new_full((), 0.5)), (A, B)),
        ("transposed", lambda a, b: operators.flatten([(a @ b).t()], [0], 6400, a.dtype), (A, B)),
        ("a sum", lambda a, b: operators.flatten([a @ b + 1], [0], 6400, a.dtype), (A, B)),
        ("a part", lambda a, b: operators.flatten([(a @ b)[:32]], [0], 6400, a.dtype), (A, B)),
        ("read twice", lambda a, b: (operators.flatten([c := a @ b], [0], 6400, a.dtype), c + 1), (A, B)),
        ("in two places", lambda a, b: operators.flatten([c := a @ b, c], [0, 6000], 12000, a.dtype), (A, B)),
        ("no product", lambda a, b: operators.flatten([a, b], [0, 4000], 8000, a.dtype), (A, B)),
        ("nothing", lambda a, b: operators.flatten([a[:0] @ b], [0], 6400, a.dtype), (A, B)),
    ],
)
def test_what_is_left_alone(why: str, function: Callable[..., Any], given: tuple[Tensor, ...]) -> None:
    graph = traced(function, *given)
    before = [str(node) for node in graph.nodes]
    assert product_ not in counts(graph), why
    assert [str(node) for node in graph.nodes] == before
    assert counts(traced(one, A, B))[product_] == 1  # the control


def test_sizes_that_move_are_left_alone() -> None:
    assert product_ not in counts(traced(one, A, B, symbolic=True))


@pytest.mark.parametrize(
    ("left", "right", "dtype", "expected"),
    [
        ((64, 32), (32, 80), torch.bfloat16, 1),
        ((64, 32), (32, 84), torch.bfloat16, 0),  # 84 * 2 bytes are no multiple of 16
        ((64, 32), (32, 84), torch.float32, 1),
        ((64, 30), (30, 80), torch.bfloat16, 0),
        ((63, 32), (32, 80), torch.float32, 0),
        ((2, 64, 32), (2, 32, 40), torch.bfloat16, 1),
        ((3, 64, 32), (3, 32, 16), torch.bfloat16, 1),  # how many matrices does not matter
    ],
)
def test_on_a_gpu_products_that_are_better_padded_are_left_to_inductor(
    left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype, expected: int
) -> None:
    with FakeTensorMode():
        a, b = (torch.empty(shape, dtype=dtype, device="cuda") for shape in (left, right))
    assert counts(traced(one, a, b))[product_] == expected


# Steps.


class Experts(nn.Module):
    """Weights that are multiplied in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 24, 24) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(3, *x.shape), self.weight).sum(0)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 72), nn.Linear(72, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24).t() / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.layers = nn.ModuleList([Feed(), Feed(), Experts(), Feed()])
        self.head = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if index == 1 else layer(x)
        return self.head(x)


def trained(how: dict[str, Any], calls: tuple[str, ...] = ("step",) * 3) -> tuple[list[Tensor], Sharded]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = Policy(**{"kernels": True, "clip": 0.5} | how)
    sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).float().square().mean(), policy=policy)
    rows = torch.randn(8, 24)
    losses = [getattr(sharded, call)(rows + index) for index, call in enumerate(calls)]
    return [*losses, sharded.grad_norm, *sharded.full_state_dict().values()], sharded


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


WITHOUT = {"without": ("direct_gradients",)}


def written(sharded: Sharded) -> list[int]:
    """How many products each program writes to their place, by what it prints."""
    return [program.text().count("fsdp_compiled.product_(") for program in sharded.programs]


@pytest.mark.parametrize(
    "how",
    chosen(
        [{}, {"precision": BF16}, {"bucket_mb": 0}, {"accumulate": "full"}, {"recompute": "unit"}],
        [{}, {"accumulate": "full"}],
    ),
)
def test_steps_are_bit_for_bit_those_without(how: dict[str, Any]) -> None:
    calls = ("step", "accumulate", "step", "step")
    mine, sharded = trained(how, calls)
    assert written(sharded) == [9, 9, 9], "two of each feed, and of the experts, the head and the stem"
    other, sharded = trained(how | WITHOUT, calls)
    assert written(sharded) == [0, 0, 0]
    for left, right in zip(mine, other, strict=True):
        assert torch.equal(left, right)


def test_at_another_place_the_steps_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    right, _ = trained({})

    def shifted(program: Program, plan: Plan) -> Program:
        edit = Edit(direct_gradients(program, plan))
        node = next(node for node in edit.graph.nodes if node.target is product_ and node.args[1] > 0)
        node.args = (node.args[0], node.args[1] - 24, *node.args[2:])
        return edit.done("broken")

    monkeypatch.setattr(fusions, "direct_gradients", shifted)
    wrong, _ = trained({})
    assert torch.equal(right[0], wrong[0]) and not torch.equal(right[1], wrong[1])


class Lender(nn.Module):
    """Three products, the second with a weight of another block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lent, self.last = (nn.Parameter(torch.randn(24, 24) / 5) for _ in range(3))

    def forward(self, x: Tensor, other: Lender) -> Tensor:
        for weight in (self.first, other.lent, self.last):
            x = torch.tanh(x @ weight)
        return x


class Lenders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lender() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.layers
        return right(left(x, right), left)


def test_blocks_that_multiply_with_each_others_weights() -> None:
    """One block's stretch of the buffer then lies within another's; each product still writes its own place alone."""
    found, counted = [], []
    for without in ({}, WITHOUT):
        torch.manual_seed(0)
        model = Lenders()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        policy = Policy(kernels=True, bucket_mb=0, **without)
        sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=policy)
        rows = torch.randn(8, 24)
        found.append([*(sharded.step(rows + step) for step in range(3)), *sharded.full_state_dict().values()])
        counted += written(sharded)
    assert counted == [6, 0]
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


class Sum(nn.Module):
    """One product is the gradient of both weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(24, 24) / 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.a + self.b)


def test_one_product_is_the_gradient_of_two_weights() -> None:
    torch.manual_seed(0)
    model, rows = Sum(), torch.randn(8, 24)
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    sharded = compile_sharded(
        model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=Policy(kernels=True, lower="inductor")
    )
    for step in range(3):
        loss = plain(rows + step).square().mean()
        torch.testing.assert_close(sharded.step(rows + step), loss.detach())
        other.zero_grad()
        loss.backward()
        other.step()
    for name, value in sharded.full_state_dict().items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


def test_equal_blocks_stay_one_piece() -> None:
    pieces = []
    for how in ({}, WITHOUT):
        _, sharded = trained(how, ("step",))
        lowering = Lowering(sharded.program, {}, "inductor", sharded.plan.blocks)
        pieces.append(len(lowering.pieces))
    assert pieces[0] == pieces[1] + 1, "the stem's product, which is compiled where it writes"


def test_a_gradient_is_not_in_memory_twice() -> None:
    allocated = []
    for how in ({}, WITHOUT):
        _, sharded = trained(how)
        with record() as recording:
            sharded.step(torch.randn(8, 24))
        allocated.append(sum(event.nbytes for event in recording.events if event.nbytes > 0))
    products = 4 * (3 * 2 * 24 * 72 + 3 * 24 * 24 + 24 * 24)
    assert products <= allocated[1] - allocated[0] < 1.1 * products


def test_inductor_is_left_to_choose_kernels_where_it_is_told_to() -> None:
    with torch._inductor.config.patch(max_autotune_gemm=True):
        assert chooses_products()
    assert not chooses_products()
    assert written(trained({"lower": "eager"}, ("step",))[1]) == [0]
    plan = trained({}, ("step",))[1].plan
    on, off = (fusions.fusions_for(fusions.Target(plan, (), True, tuned=tuned)) for tuned in (False, True))
    assert direct_gradients in on and direct_gradients not in off
