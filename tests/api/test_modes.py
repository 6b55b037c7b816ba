"""Modes around a call: what eager PyTorch computes under them, or an error that names them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture import global_modes
from tests.modes import EAGER, Routed, T, X, amp, eager_step, loss_fn, off, pair
from tests.parts import parts

Around = Callable[[], AbstractContextManager[Any]]


class Makes(nn.Module):
    """Makes tensors without a dtype or a device."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.arange(4) / 3 + torch.ones(4) / 7
        return self.line(x) * scale


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def precision(of: Any, wanted: str) -> Iterator[None]:
    before = of.fp32_precision
    of.fp32_precision = wanted
    try:
        yield
    finally:
        of.fp32_precision = before


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


DTYPE: Around = lambda: default_dtype(torch.float64)  # noqa: E731
CPU: Around = lambda: torch.device("cpu")  # noqa: E731
MATH: Around = lambda: sdpa_kernel(SDPBackend.MATH)  # noqa: E731
QUIET: Around = lambda: torch.autograd.detect_anomaly(check_nan=False)  # noqa: E731


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("around", "label"),
    [
        (DTYPE, ", default dtype float64"),
        (CPU, ", default device cpu"),
        (default_device, ", default device cpu"),
        (deterministic, ", deterministic algorithms True"),
        (MATH, "flash attention False"),
        (lambda: precision(torch.backends.cuda.matmul, "tf32"), ", fp32 products on cuda tf32"),
        (lambda: precision(torch.backends.cudnn.conv, "ieee"), ", fp32 convolutions on cuda ieee"),
        (lambda: precision(torch.backends.cudnn.rnn, "ieee"), ", fp32 recurrences on cuda ieee"),
        (lambda: precision(torch.backends.mkldnn.rnn, "ieee"), ", fp32 recurrences on mkldnn ieee"),
        (QUIET, None),
        (torch.no_grad, None),  # as under torch.func.grad, what differentiates does so whatever is around
        (lambda: torch.compiler.set_stance("force_eager"), None),
    ],
)
def test_a_mode_that_is_honoured(around: Around, label: str | None) -> None:
    """In turns with none: eager's numbers, and a program of its own if what is computed may differ."""
    with parts() as of:
        plain, optimizer, sharded = pair(Makes)
    for step in range(4):
        inside = step % 2 == 0
        forward = nullcontext() if around is torch.no_grad or not inside else around()
        expected = eager_step(plain, optimizer, forward)
        with around() if inside else nullcontext():
            loss = sharded.step(X, T)
        assert loss.dtype == expected.dtype and torch.equal(loss, expected)
    assert off(plain, sharded) == 0.0
    assert sharded.captures == 1 + (label is not None)
    assert label is None or label in of(sharded).programs.cached[0].label


def test_which_attention_is_traced_follows_the_callers_choice() -> None:
    def attend(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = model(x).view(1, 1, 6, 4)
        return F.scaled_dot_product_attention(h, 2 * h, h + 1).square().mean()

    torch.manual_seed(0)
    sharded = compile_sharded(nn.Linear(8, 4), loss=attend, policy=EAGER)
    sharded.value_and_grad(X)
    with sdpa_kernel(SDPBackend.MATH):
        sharded.value_and_grad(X)
    flash, math = (str(program.graph) for program in sharded.programs)
    assert "scaled_dot_product_flash_attention" in flash and "scaled_dot_product" not in math


def test_inference_mode() -> None:
    """What trains is refused before anything is changed; forward works, and training goes on after it."""
    plain, optimizer, sharded = pair()
    for call in (sharded.step, sharded.accumulate, sharded.value_and_grad):
        with torch.inference_mode(), pytest.raises(ValueError, match=r"inside torch.inference_mode\(\).*sharded\("):
            call(X, T)
    assert off(plain, sharded) == 0.0
    with torch.inference_mode():
        assert torch.equal(sharded(X), plain(X))  # which updates the norm's buffers
        batch = X.clone(), T.clone()
    for _ in range(2):
        expected = eager_step(plain, optimizer, nullcontext())
        assert torch.equal(sharded.step(*batch), expected)  # tensors made in inference mode may be a batch
    assert off(plain, sharded) == 0.0


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Seeing(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("around", "name"),
    [
        (Watching, "tests.api.test_modes.Watching, a TorchFunctionMode|test_modes.Watching, a TorchFunctionMode"),
        (FakeTensorMode, "FakeTensorMode: a step on tensors without numbers"),
        (torch.autograd.graph.save_on_cpu, "hooks for saved tensors"),
        (torch.autograd.detect_anomaly, r"set_detect_anomaly\(True\)"),
    ],
)
def test_a_mode_that_cannot_be_honoured_is_refused_by_name(around: Around, name: str) -> None:
    plain, _, sharded = pair()
    for call in (sharded.step, sharded.accumulate, sharded.value_and_grad):
        with around(), pytest.raises(ValueError, match=name):
            call(X, T)
    assert off(plain, sharded) == 0.0 and sharded.captures == 0


def test_a_call_inside_a_transform_is_refused() -> None:
    _, _, sharded = pair()
    with pytest.raises(ValueError, match=r"inside a torch\.func transform"):
        torch.func.vmap(lambda x: sharded.step(x, T))(X[None])


def test_a_dispatch_mode_sees_the_programs_operators() -> None:
    """And no capture: the second step, which captures nothing, shows it the same."""
    plain, _, sharded = pair()
    with FlopCounterMode(display=False) as eager:
        loss_fn(plain, X, T).backward()
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            sharded.step(X, T)
        assert counter.get_total_flops() == eager.get_total_flops() > 0
    counts = []
    for _ in range(2):
        with Seeing() as mode:
            sharded.step(X[:4], T[:4])
        counts.append(len([name for name in mode.seen if "mm" in name]))
    assert counts[0] == counts[1] > 0 and sharded.captures == 2


def test_a_dispatch_mode_around_compiled_code_is_refused() -> None:
    _, _, sharded = pair(policy=Policy())
    with FlopCounterMode(display=False), pytest.raises(ValueError, match=r'FlopCounterMode.*lower="eager"'):
        sharded.step(X, T)
    assert sharded.captures == 0


def test_compile_sharded_itself_may_be_called_under_anything() -> None:
    torch.manual_seed(0)
    plain = Routed()
    with torch.inference_mode(), amp(), torch.device("meta"), Seeing() as mode:
        with torch.device("cpu"), torch.inference_mode(False):
            model = copy.deepcopy(plain)
            optimizer = torch.optim.Adadelta(model.parameters(), capturable=False)
        sharded = compile_sharded(model, optimizer, loss=loss_fn, policy=EAGER)
        assert _get_current_dispatch_mode_stack() == [mode] and torch.is_autocast_enabled("cpu")
        assert torch.get_default_device().type == "meta" and torch.is_inference_mode_enabled()
    assert torch.get_default_device().type == "cpu" and not torch.is_autocast_enabled("cpu")
    other = torch.optim.Adadelta(plain.parameters())
    for _ in range(2):
        assert torch.equal(sharded.step(X, T), eager_step(plain, other, nullcontext()))


def test_a_caller_under_torch_compile() -> None:
    """A graph before the call and one after it."""
    plain, optimizer, sharded = pair()
    compiled = torch.compile(lambda x, target: sharded.step(x * 1.0, target) * 2, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(X, T), 2 * eager_step(plain, optimizer, nullcontext()))
    method = torch.compile(sharded.step, backend="eager")
    assert torch.equal(method(X, T), eager_step(plain, optimizer, nullcontext()))
    assert sharded.captures == 1 and off(plain, sharded) == 0.0


def test_a_caller_that_wants_one_whole_graph_is_told_why_not() -> None:
    _, _, sharded = pair()
    compiled = torch.compile(lambda x, target: sharded.step(x, target) * 2, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fsdp_compiled compiles the step by itself"):
        compiled(X, T)


def test_what_is_left_comes_back() -> None:
    """Whatever happens inside; and nothing is done where nothing is on."""
    assert global_modes.outside_modes() is global_modes.outside_modes()
    mode = Seeing()
    with amp(), torch.device("meta"), torch.inference_mode(), mode, default_dtype(torch.float64):
        before = global_modes.now()
        with pytest.raises(KeyError), global_modes.outside_modes():
            assert global_modes.now() == before._replace(autocast=(), device=None)
            assert torch.empty(()).device.type == "cpu" and not torch.is_inference_mode_enabled()
            assert not _get_current_dispatch_mode_stack()
            with before.entered():
                assert global_modes.now() == before and not torch.is_autocast_cache_enabled()
            raise KeyError
        assert global_modes.now() == before and _get_current_dispatch_mode_stack() == [mode]
        assert torch.is_inference_mode_enabled() and torch.is_autocast_cache_enabled()
    assert global_modes.now() == before._replace(autocast=(), device=None, dtype=torch.float32)
