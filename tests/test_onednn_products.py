"""Matrix products by oneDNN: the same numbers, by a rule that all ranks share, and only in compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product as every
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.kernels.products import product
from fsdp_compiled.lower.backends import Backends, Host, decided, favours_onednn, this_host, vendor
from fsdp_compiled.lower.fusions.onednn_products import onednn_products
from fsdp_compiled.runtime.programs import program_maker

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not there")  # type: ignore[no-untyped-call]

aten = torch.ops.aten
NAME = "fsdp_compiled_cpu::product"


def hosts(monkeypatch: pytest.MonkeyPatch, favours: bool) -> None:
    """Makes this machine one that is better off with oneDNN, or one that is not."""
    mine = this_host
    monkeypatch.setattr(program_maker, "this_host", lambda: Host(mine().allowed, favours, mine().tuned))


@contextmanager
def forbidden() -> Iterator[None]:
    """As `torch.backends.mkldnn.flags`, which warns about other devices in torch 2.13."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def _laid(rows: int, columns: int, how: str) -> Tensor:
    if how == "transposed":
        return torch.randn(columns, rows).t()
    if how == "sliced":
        return torch.randn(rows, columns + 3)[:, 1 : 1 + columns]
    if how == "repeated":
        return torch.randn(1, columns).expand(rows, columns)
    return torch.randn(rows, columns)


@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 70),
    k=st.integers(1, 70),
    n=st.integers(1, 70),
    left=st.sampled_from(["plain", "transposed", "sliced", "repeated"]),
    right=st.sampled_from(["plain", "transposed", "sliced", "repeated"]),
)
def test_any_strides_give_the_product(m: int, k: int, n: int, left: str, right: str) -> None:
    a, b = _laid(m, k, left), _laid(k, n, right)
    found, exact = product(a, b), a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    error = 1e-6 * size
    assert found.is_contiguous() and found.shape == (m, n)
    assert ((found - exact).abs() <= error).all()
    told = exact.abs() > 0.01 * size  # of sums that cancel, a thousandth is less than the error
    assert not ((found * 1.001 - exact).abs() <= error)[told].any()


def test_the_operator_keeps_the_rules_of_operators() -> None:
    torch.library.opcheck(product, (torch.randn(5, 7), torch.randn(9, 7).t()))


def _chosen(function: Callable[..., Tensor], *inputs: Tensor, symbolic: bool = False) -> list[Any]:
    graph: fx.Graph = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs).graph
    for node in graph.nodes:
        node.meta.setdefault("phase", "forward")
    graph.output_node().args = (list(graph.output_node().all_input_nodes),)
    places = [Port("in", "batch", node.name) for node in graph.find_nodes(op="placeholder")]
    before = Program(graph, (*places, Port("out", "result", "0")), ())
    text = before.text()
    program = onednn_products(before, None)  # type: ignore[arg-type]
    assert before.text() == text
    (found,) = fx.GraphModule(nn.Module(), program.graph)(*inputs)
    torch.testing.assert_close(found, function(*inputs), rtol=1e-5, atol=1e-4)
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def test_only_large_float32_products_of_known_size_are_changed() -> None:
    large, small = torch.randn(256, 256), torch.randn(64, 64)
    bias = torch.randn(256)
    assert _chosen(torch.mm, large, large.t()) == [product]
    assert _chosen(torch.mm, small, small) == [aten.mm.default]
    assert _chosen(torch.mm, large.double(), large.double()) == [aten.mm.default]
    assert _chosen(torch.mm, large, large, symbolic=True)[-1] == aten.mm.default
    assert _chosen(torch.addmm, bias, large, large) == [product, aten.add.Tensor]
    scaled: Callable[..., Tensor] = lambda bias, a, b: torch.addmm(bias, a, b, alpha=2.0)  # noqa: E731
    assert _chosen(scaled, bias, large, large) == [aten.addmm.default]


def test_the_rule() -> None:
    """AMD's processors with AVX-512, where PyTorch's BLAS is MKL."""
    vendors, capabilities = ("AuthenticAMD", "HygonGenuine", "GenuineIntel", ""), ("AVX512", "AVX2", "DEFAULT")
    found = [given for given in every(vendors, capabilities, (True, False)) if favours_onednn(*given)]
    assert found == [("AuthenticAMD", "AVX512", True), ("HygonGenuine", "AVX512", True)]
    assert vendor() == vendor() and this_host() == this_host()


def test_rank_0_decides_and_any_rank_forbids() -> None:
    amd, intel, without = Host(True, True, False), Host(True, False, False), Host(False, True, False)
    assert decided([amd, intel], {"shard": "gloo"}) == Backends(("shard",), onednn=True)
    assert decided([intel, amd], {"shard": "nccl"}) == Backends()
    assert decided([amd, without], {}) == Backends()
    assert decided([amd, Host(True, True, tuned=True)], {}).tuned


def _trained(lower: str, without: tuple[str, ...] = ()) -> tuple[list[float], int, int]:
    """The losses of some steps, how many products of ours the last one took, and how many the program says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256, bias=False), nn.GELU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = compile_sharded(
        model,
        optimizer,
        loss=lambda model, x: model(x).square().mean(),
        policy=Policy(lower=lower, without=without),
    )
    rows = torch.randn(256, 256)
    losses = [sharded.step(rows).item() for _ in range(4)]
    with torch.profiler.profile(acc_events=True) as profile:
        losses.append(sharded.step(rows).item())
    taken = sum(event.count for event in profile.key_averages() if event.key == NAME)
    return losses, taken, sharded.program.text().count("product(")


def test_a_compiled_step_takes_them_and_an_eager_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts(monkeypatch, True)
    losses, taken, printed = _trained("inductor")
    eager, none, nothing = _trained("eager")
    assert (taken, none) == (5, 0)  # two products of forward; of backward, two of weights and one of activations
    assert (printed, nothing) == (5, 0)
    assert losses == pytest.approx(eager, rel=1e-6)
    assert losses != pytest.approx([loss * 1.0001 for loss in eager], rel=1e-6)
    with forbidden():
        same, none, nothing = _trained("inductor")
    assert none == nothing == 0 and same == pytest.approx(eager, rel=1e-6)
    assert _trained("inductor", without=("onednn_products",))[1:] == (0, 0)
    hosts(monkeypatch, False)
    assert _trained("inductor")[1:] == (0, 0)
