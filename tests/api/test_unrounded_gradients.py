"""Products in half precision that write float32: nearer to the true gradient, less traffic; refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compiled import Policy, Program, Sharded, compile_sharded
from fsdp_compiled.ir.nodes import Mark
from fsdp_compiled.kernels.aten_operators import product_, widening
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.lower.fusions.flatten_gradients import write
from fsdp_compiled.runtime import checked_call

aten = torch.ops.aten
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MEANT: dict[str, Any] = {"precision": HALF, "kernels": True, "unrounded_gradients": True}


def test_the_operator_writes_what_the_product_is_in_float32() -> None:
    for left, right in ((torch.randn(5, 40), torch.randn(40, 7)), (torch.randn(3, 5, 40), torch.randn(3, 40, 7))):
        left, right = left.bfloat16(), right.bfloat16()
        exact = (left.double() @ right.double()).flatten()
        flat = torch.full((exact.numel() + 5,), 7.0)
        product_(flat, 2, left, right)
        torch.testing.assert_close(flat[2:-3].double(), exact, rtol=1e-5, atol=1e-5)
        assert (flat[:2] == 7).all() and (flat[-3:] == 7).all()
        assert not torch.equal(flat[2:-3], (left @ right).float().flatten()), "the control: that is rounded"


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.float64, 0), (torch.float16, 0)])
def test_a_product_in_half_precision_is_written_into_float32_alone_and_where_it_is_asked_for(
    dtype: torch.dtype, count: int
) -> None:
    def one(a: Tensor, b: Tensor) -> Tensor:
        return operators.flatten([a @ b], [0], 6400, dtype)

    for unrounded in (False, True):
        with FakeTensorMode():
            given = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(32, 80, dtype=torch.bfloat16)
            graph = make_fx(one)(*given).graph
        for node in graph.nodes:
            node.meta |= {"phase": "backward", "mark": Mark("flatten", "unit", "buffer")}
        write(graph, unrounded=unrounded)
        assert len(graph.find_nodes(op="call_function", target=product_)) == (count if unrounded else 0)


def stepped(monkeypatch: pytest.MonkeyPatch, unrounded: bool) -> tuple[Sharded, dict[str, Tensor]]:
    monkeypatch.setattr(checked_call, "widening", lambda device: "")  # as if this were a GPU
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 72), nn.Tanh(), nn.Linear(72, 24, bias=False))
    policy = Policy(**MEANT | {"unrounded_gradients": unrounded, "copies": False})
    sharded = compile_sharded(model, loss=lambda model, x: model(x).float().square().mean(), policy=policy)
    return sharded, sharded.value_and_grad(torch.randn(8, 24))[1]


def traffic(program: Program) -> int:
    """Bytes that are moved to bring products, as they are summed up, to where they are sent from."""
    moved = 0
    for node in program.graph.nodes:
        if node.target is operators.flatten.default:
            products = [one for one in node.args[0] if one.meta["val"].dim() == 2]
            moved += sum(one.meta["val"].numel() * (2 * one.meta["val"].itemsize + 4) for one in products)
        elif node.target is product_:
            moved += node.args[2].meta["val"].shape[0] * node.args[3].meta["val"].shape[1] * 4
    return moved


def test_gradients_are_those_that_would_be_rounded_for_half_the_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded_from, rounded = stepped(monkeypatch, False)
    unrounded_from, found = stepped(monkeypatch, True)
    assert traffic(unrounded_from.program) * 2 == traffic(rounded_from.program) == 8 * 2 * 24 * 72
    for name, gradient in rounded.items():
        assert torch.equal(gradient, gradient.bfloat16().float()), "FSDP2's gradient is rounded"
        error = (found[name] - gradient).abs() / gradient.abs().max()
        assert error.max() < 2**-7
        if name.endswith("weight"):
            assert (found[name] != found[name].bfloat16().float()).float().mean() > 0.9


def test_where_pytorch_has_no_such_product_it_is_refused_by_name() -> None:
    assert "mm.dtype_out" in widening(torch.device("cpu"))
    model = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"Policy.unrounded_gradients needs .* not have on cpu: torch.mm.*Leave it out"
    ):
        compile_sharded(model, loss=lambda model, x: model(x).sum(), policy=Policy(**MEANT))
    assert model(torch.ones(1, 4)).shape == (1, 4), "nothing was changed"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"precision": MixedPrecisionPolicy()}, "param_dtype is None"),
        ({"precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "reduce_dtype is None"),
        ({"lower": "eager"}, "lower='eager'"),
        ({"kernels": False}, "kernels=False"),
        ({"without": ("direct_gradients",)}, "leaves out"),
        ({"unrounded_gradients": 1.5}, "expected one of False, True"),
    ],
)
def test_a_policy_under_which_it_would_do_nothing_is_refused(how: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Policy(**MEANT | how)


def test_on_a_device_that_errs_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(of: Callable[..., Tensor], wrong: float) -> Callable[..., Tensor]:
        return lambda left, right, *, out_dtype, out: out.copy_(of(left.to(out_dtype), right.to(out_dtype)) + wrong)

    for wrong, said in ((0.0, ""), (1e-3, "other numbers")):
        monkeypatch.setattr(torch, "mm", product(torch.matmul, 0.0))
        monkeypatch.setattr(torch, "bmm", product(torch.matmul, wrong))
        assert said in widening(torch.device("cpu")) and bool(widening(torch.device("cpu"))) == bool(said)
