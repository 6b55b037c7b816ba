"""Modes around a call: what eager PyTorch computes under them, or an error that names them.

Eager is plain PyTorch with the forward inside the mode and ``loss.backward()`` after it, as PyTorch recommends.
"""

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
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from fsdp_compiled import LossScale, Policy, Sharded, compile_sharded
from fsdp_compiled.capture import ambient
from tests.parts import parts

Around = Callable[[], AbstractContextManager[Any]]
EAGER = Policy(lower="eager")
X, T = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4


class Routed(nn.Module):
    """A part in fp32 whatever is around it, whose products are in backward too, and a buffer that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            x = F.softmax(self.router(x), -1) @ self.router.weight + x
        return self.head(x)


def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), target)


def amp(on: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=on)


def pair(
    make: Callable[[], nn.Module] = Routed, policy: Policy = EAGER, loss: Callable[..., torch.Tensor] = loss_fn
) -> tuple[nn.Module, torch.optim.Optimizer, Sharded]:
    """A plain model with its optimizer, and the same one sharded."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    sharded = compile_sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, policy=policy)
    return plain, torch.optim.SGD(plain.parameters(), lr=0.1), sharded


def eager_step(plain: nn.Module, optimizer: torch.optim.Optimizer, around: AbstractContextManager[Any]) -> torch.Tensor:
    with around:
        loss = loss_fn(plain, X, T)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def off(plain: nn.Module, sharded: Sharded) -> float:
    """The largest difference of any weight or buffer."""
    found = sharded.full_state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_autocast_around_a_model_with_a_part_in_fp32(lower: Any) -> None:
    """Inside and outside in turns: two programs, and eager's numbers."""
    with parts() as of:
        plain, optimizer, sharded = pair(policy=Policy(lower=lower))
    wrong, other, _ = pair()
    losses = []
    for step in range(4):
        expected = eager_step(plain, optimizer, amp(step % 2 == 0))
        eager_step(wrong, other, nullcontext())
        with amp(step % 2 == 0):
            losses.append((sharded.step(X, T), expected))
    bound = 0.0 if lower == "eager" else 5e-4  # compiled code rounds to bf16 in other places
    assert all((loss - expected).abs() <= bound for loss, expected in losses)
    assert off(plain, sharded) <= bound
    assert lower == "inductor" or off(wrong, sharded) > 0  # a control: the modes are that far apart, and no farther
    assert sharded.captures == 2
    labels = sorted(compiled.label for compiled in of(sharded).programs.cached)
    assert labels[1] == labels[0] + ", under autocast(cpu, bfloat16)"


def test_backward_is_eagers_after_the_block_not_inside_it() -> None:
    """A control: backward inside autocast multiplies the fp32 part's gradients in bf16."""
    plain, optimizer, sharded = pair()
    inside, other, _ = pair()
    for _ in range(2):
        eager_step(plain, optimizer, amp())
        with amp():
            loss_fn(inside, X, T).backward()
            other.step()
            other.zero_grad()
            sharded.step(X, T)
    assert off(plain, sharded) == 0.0 < off(inside, sharded)


class Written(torch.autograd.Function):
    """A product with a backward of the user's, which sees what is on when backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x) @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        return (gradient @ weight.T) * (1 - torch.tanh(x) ** 2), torch.tanh(x).T @ gradient


class Decorated(Written):
    """Its backward runs as its forward did, as `torch.amp.custom_bwd` has it."""

    forward = staticmethod(torch.amp.custom_fwd(Written.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Written.backward, device_type="cpu"))


class Custom(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.first(x).float(), self.second.weight.T)  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [Written, Decorated])
def test_an_autograd_function_of_the_users_under_autocast(function: Any) -> None:
    plain, optimizer, sharded = pair(lambda: Custom(function))
    for _ in range(2):
        expected = eager_step(plain, optimizer, amp())
        with amp():
            assert torch.equal(sharded.step(X, T), expected)
    assert off(plain, sharded) == 0.0


def test_all_calls_are_made_under_the_mode() -> None:
    """Microbatches, gradients alone, the functional form and forward alone."""
    plain, optimizer, sharded = pair()
    for part in (slice(0, 3), slice(3, 6)):
        with amp():
            loss = loss_fn(plain, X[part], T[part])
        (loss / 2).backward()
    with amp():
        sharded.accumulate(X[:3], T[:3])
        sharded.step(X[3:], T[3:])
    optimizer.step()
    optimizer.zero_grad()
    assert off(plain, sharded) <= 1e-7
    with amp():
        loss = loss_fn(plain, X, T)
    loss.backward()
    with amp():
        value, gradients = sharded.value_and_grad(X, T)
    assert torch.equal(value, loss)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad.flatten()), name
    optimizer.zero_grad()
    expected = eager_step(plain, optimizer, amp())
    with amp():
        assert torch.equal(sharded.apply(sharded.state, X, T)[1], expected)
        plain.eval(), sharded.model.eval()
        with torch.no_grad():
            assert (sharded(X) - plain(X)).abs().max() <= 1e-2
    assert off(plain, sharded) <= 1e-7


def test_fp16_with_a_loss_scale() -> None:
    """As a GradScaler with the same scale."""
    plain, optimizer, _ = pair()
    _, _, sharded = pair(policy=Policy(lower="eager", loss_scale=LossScale(init=256.0, interval=2)))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for _ in range(5):
        with amp(dtype=torch.float16):
            loss = loss_fn(plain, X, T)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with amp(dtype=torch.float16):
            assert torch.allclose(sharded.step(X, T), loss, rtol=1e-6, atol=0)
    assert off(plain, sharded) <= 1e-6
    assert float(sharded.loss_scale) == scaler.get_scale() > 256.0


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Softmax(-1), nn.Linear(16, 4))


def test_autocast_with_a_mixed_precision_policy() -> None:
    """Parameters cast by the policy first: autocast finds nothing to cast, but keeps its own list of fp32 operators."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, _, sharded = pair(layers, Policy(lower="eager", precision=policy))
    low = copy.deepcopy(plain).bfloat16()
    with amp():
        loss = loss_fn(low, X.bfloat16(), T)
    loss.backward()
    with amp():
        value, gradients = sharded.value_and_grad(X, T)
    assert value.dtype == loss.dtype and torch.equal(value, loss)
    for name, parameter in low.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad.flatten().float()), name


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
        (Watching, "tests.test_modes.Watching, a TorchFunctionMode|test_modes.Watching, a TorchFunctionMode"),
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


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def follow(policy: Policy, batches: list[torch.Tensor], loss: Callable[..., torch.Tensor] = squares) -> Sharded:
    """Steps on these batches, each with eager's loss and weights."""
    plain, optimizer, sharded = pair(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)), policy, loss)
    for x in batches:
        expected = loss(plain, x)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(sharded.step(x), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    found = sharded.full_state_dict()
    torch.testing.assert_close(dict(plain.state_dict()), found, rtol=1e-5, atol=1e-6, equal_nan=True)
    return sharded


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_a_batch_with_the_negative_or_conjugate_bit(lower: Any) -> None:
    """It is what it stands for, in the program of an ordinary one."""
    z = torch.randn(6, 8, dtype=torch.complex64)
    negative = z.conj().imag
    assert negative.is_neg()
    sharded = follow(Policy(lower=lower), [negative, negative.clone().as_strided((6, 8), (8, 1)), z.imag])
    assert sharded.captures == 2  # the last one's strides are others
    wide = compile_sharded(
        nn.Linear(8, 4), loss=lambda m, z: m(z.imag).mean() + z.real.mean(), policy=Policy(lower=lower)
    )
    assert torch.equal(wide.value_and_grad(z.conj())[0], wide.value_and_grad(z.conj().resolve_conj())[0])
    assert not torch.equal(wide.value_and_grad(z)[0], wide.value_and_grad(z.conj())[0])
    assert wide.captures == 1


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rows: torch.randn(8, rows).t(), id="transposed"),
        pytest.param(lambda rows: torch.randn(rows, 16)[:, ::2], id="every second column"),
        pytest.param(lambda rows: torch.randn(2 * rows, 8)[::2], id="every second row", marks=pytest.mark.exhaustive),
        pytest.param(lambda rows: torch.randn(1, 8).expand(rows, 8), id="one row"),
        pytest.param(lambda rows: torch.randn(rows, 1).expand(rows, 8), id="one column", marks=pytest.mark.exhaustive),
        pytest.param(lambda rows: torch.randn(rows, 3, 8).transpose(0, 1), id="a dim exchanged"),
        pytest.param(lambda rows: torch.randn(rows, 20)[:, 3:11], id="a slice", marks=pytest.mark.exhaustive),
    ],
)
def test_a_batch_with_odd_strides_whose_size_moves(make: Callable[[int], torch.Tensor]) -> None:
    sharded = follow(Policy(lower="eager", dynamic=True), [make(5), make(7), make(9)])
    assert sharded.captures <= 3


LOSSES = {
    "mean": squares,
    "mse": lambda m, x: F.mse_loss(m(x), x[..., :4]),
    "smooth": lambda m, x: F.smooth_l1_loss(m(x), x[..., :4]),
    "huber": lambda m, x: F.huber_loss(m(x), x[..., :4]),
    "sum": lambda m, x: m(x).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_batch(loss: str, tmp_path: Any) -> None:
    """Eager's numbers, NaN for a mean; and what describes the program can describe it."""
    batches = [torch.randn(3, 8), torch.randn(0, 8)] if loss == "sum" else [torch.randn(0, 8)]
    sharded = follow(EAGER, batches, LOSSES[loss])
    assert sharded.memory.text() and sharded.dump(tmp_path)


def test_what_is_left_comes_back() -> None:
    """Whatever happens inside; and nothing is done where nothing is on."""
    assert ambient.outside_modes() is ambient.outside_modes()
    mode = Seeing()
    with amp(), torch.device("meta"), torch.inference_mode(), mode, default_dtype(torch.float64):
        before = ambient.now()
        with pytest.raises(KeyError), ambient.outside_modes():
            assert ambient.now() == before._replace(autocast=(), device=None)
            assert torch.empty(()).device.type == "cpu" and not torch.is_inference_mode_enabled()
            assert not _get_current_dispatch_mode_stack()
            with before.entered():
                assert ambient.now() == before and not torch.is_autocast_cache_enabled()
            raise KeyError
        assert ambient.now() == before and _get_current_dispatch_mode_stack() == [mode]
        assert torch.is_inference_mode_enabled() and torch.is_autocast_cache_enabled()
    assert ambient.now() == before._replace(autocast=(), device=None, dtype=torch.float32)
