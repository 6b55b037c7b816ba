"""What a script does beside the plain loop with `fully_shard`: as eager PyTorch, or refused; in a world of one."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compiled import FSDPModule, Policy, compile_sharded, fully_shard, own_loop
from tests.allocator import record
from tests.launch import ROOT, launch
from tests.toys import net

X, Y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 2)


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.mse_loss(model(X), Y)


def plain_gradients() -> tuple[torch.Tensor, ...]:
    model = net()
    return torch.autograd.grad(loss_of(model), list(model.parameters()))


def full(values: Any) -> list[torch.Tensor]:
    return [value.full_tensor() for value in values]


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_an_optimizer_that_was_made_before_is_given_the_sharded_parameters() -> None:
    model, plain = net(), net()
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, plain))
    assert fully_shard(model) is model
    assert isinstance(model, nn.Sequential) and isinstance(model, FSDPModule)
    for _ in range(2):
        for one, optimizer in ((model, ours), (plain, theirs)):
            loss_of(one).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(full(model.parameters()), plain.parameters())


def test_an_optimizer_with_state_is_refused_each_time_and_nothing_changes() -> None:
    model = net()
    fresh, used = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=0.1)
    loss_of(model).backward()
    used.step()
    before = list(model.parameters())
    fully_shard(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="Adam has state of parameters"):
            model(X)
    assert all(one is other for one, other in zip(fresh.param_groups[0]["params"], before, strict=True))
    del used
    gc.collect()
    loss_of(model).backward()
    fresh.step()
    assert all(one is other for one, other in zip(fresh.param_groups[0]["params"], model.parameters(), strict=True))


def test_what_is_sharded_later_inside_is_checked_and_taken_in() -> None:
    model = nn.Sequential(net(), nn.Linear(2, 2))
    fully_shard(model)
    model(X)
    late = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
    model.append(fully_shard(late))
    model(X).sum().backward()
    before = late.weight.full_tensor().clone()
    optimizer.step()
    assert not torch.equal(late.weight.full_tensor(), before)
    model.append(fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(torch.bfloat16)))
    for _ in range(2):
        with pytest.raises(ValueError, match="different mp_policy"):
            model(X)


def test_compile_sharded_is_there_beside_it() -> None:
    model = net()
    fully_shard(model)
    loss_of(model).backward()
    other = net()
    sharded = compile_sharded(
        other, torch.optim.SGD(other.parameters(), lr=0.1), loss=loss_of, policy=Policy(lower="eager")
    )
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss = loss_of(plain)
    loss.backward()
    optimizer.step()
    assert torch.equal(sharded.step(), loss.detach())
    assert all(torch.equal(one, plain.state_dict()[name]) for name, one in sharded.full_state_dict().items())


def test_gradients_that_are_asked_for_go_to_who_asked() -> None:
    model = fully_shard(net())
    parameters = list(model.parameters())
    assert same(full(torch.autograd.grad(loss_of(model), parameters)), plain_gradients())
    assert all(one.grad is None for one in parameters)
    loss_of(model).backward(inputs=[parameters[0]])
    assert [one.grad is None for one in parameters] == [False, True, True, True]
    with pytest.raises(RuntimeError, match="no derivative of its backward program"):
        torch.autograd.grad(loss_of(model), parameters, create_graph=True)


def test_hooks_on_parameters_run() -> None:
    model = fully_shard(net())
    first, second, *_ = model.parameters()
    seen = []
    first.register_hook(lambda gradient: gradient * 2)
    second.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.full_tensor()))
    loss_of(model).backward()
    expected = plain_gradients()
    assert same([first.grad.full_tensor(), *seen], [expected[0] * 2, expected[1]])


def test_hooks_of_what_no_result_depends_on_are_not_called() -> None:
    """Autograd calls those of each input of a function with None where there is no gradient."""
    model = fully_shard(net())
    weight = model[-1].weight
    weight.register_hook(lambda gradient: gradient * 2)
    loss_of(model).backward()
    assert same([weight.grad.full_tensor()], [plain_gradients()[-2] * 2])
    model[-1].forward = lambda given: given[:, :2]
    model.zero_grad()
    loss_of(model).backward()
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss_of(model), [weight])
    assert torch.autograd.grad(loss_of(model), [weight, model[0].weight], allow_unused=True)[0] is None


class Two(nn.Module):
    """Of two results, one does not depend on the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return hidden, self.head(hidden)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_what_a_backward_does_not_reach_are_refused(register: str) -> None:
    """Autograd would call them, with None, or after an update of an older gradient."""
    model, seen = fully_shard(Two()), []
    getattr(model.head.weight, register)(lambda given: seen.append(given) or None)
    sum(one.sum() for one in model(X)).backward()
    assert len(seen) == 1
    hidden, _ = model(X)
    with pytest.raises(RuntimeError, match="weight has a hook"):
        hidden.sum().backward()
    assert len(seen) == 1
    hidden, result = model(X)
    (hidden.sum() + 0 * result.sum()).backward()
    assert len(seen) == 2


def test_hooks_after_a_gradient_are_not_called_while_it_is_held_back() -> None:
    model = fully_shard(net())
    weight, seen = model[-1].weight, []
    weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.full_tensor().clone()))
    for synchronises in (True, False, True):
        model.set_requires_gradient_sync(synchronises)
        loss_of(model).backward()
    model.set_requires_gradient_sync(True)
    expected = plain_gradients()[-2]
    assert len(seen) == 2 and torch.allclose(torch.stack(seen), torch.stack([expected, 3 * expected]))
    late = loss_of(model)
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="weight has a hook"):
        late.backward()


def test_hooks_see_gradients_that_were_held_back() -> None:
    """By a backward without synchronisation, and sent with one that does not reach the parameter."""
    model = fully_shard(net())
    weight = model[-1].weight
    weight.register_hook(lambda gradient: gradient * 2)
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    assert weight.grad is None
    model.set_requires_gradient_sync(True)
    late = loss_of(model)
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="weight has a hook"):
        late.backward()
    model.set_requires_gradient_sync(True)
    forward, model[-1].forward = model[-1].forward, lambda given: given[:, :2]
    loss_of(model).backward()
    model[-1].forward = forward
    assert same([weight.grad.full_tensor()], [plain_gradients()[-2] * 2])


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_weights_that_were_updated_since_forward_are_an_error(options: dict[str, bool]) -> None:
    model = fully_shard(net())
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    first, second = loss_of(model), loss_of(model)
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    loss_of(model).backward()


@dataclass
class Output:
    logits: torch.Tensor
    others: list[Any]
    length: int


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.one(x), [self.two(x), x * 2], 3)


def test_a_dataclass_comes_back_with_the_tensors_of_its_call() -> None:
    model = fully_shard(Heads())
    first, second = model(X), model(X + 1)
    assert type(first) is Output and first.length == 3
    assert torch.equal(first.others[1], X * 2) and torch.equal(second.others[1], X * 2 + 2)
    second.logits.sum().backward()
    assert model.two.weight.grad is None and model.two.bias.grad is None
    assert torch.allclose(model.one.weight.grad.full_tensor(), (X + 1).sum(0).expand(2, 4))


def compiled_inside() -> nn.Module:
    model = net()
    model[0] = torch.compile(model[0])
    fully_shard(model[0])
    return fully_shard(model)


@pytest.mark.parametrize(
    "make", [compiled_inside, lambda: torch.compile(fully_shard(net()))], ids=["inside", "outside"]
)
def test_modules_under_torch_compile(make: Callable[[], nn.Module]) -> None:
    model = make()
    loss_of(model).backward()
    assert same(full(one.grad for one in model.parameters()), plain_gradients())


def test_inductor() -> None:
    model = fully_shard(net(), policy=Policy())
    loss_of(model).backward()
    for one, expected in zip(model.parameters(), plain_gradients(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), expected)


def test_lengths_that_move_without_synchronisation() -> None:
    model, plain = net(), net()
    fully_shard(model, policy=Policy(lower="eager", dynamic=(0, 1)))
    for sizes in ((2, 3), (3, 5), (5, 7), (4, 6)):
        model.set_requires_gradient_sync(sizes == (4, 6))
        for one in (model, plain):
            one(torch.ones(*sizes, 4)).square().mean().backward()
    assert same(full(one.grad for one in model.parameters()), [one.grad for one in plain.parameters()])
    assert len(model._fsdp_compiled.calls["forward"].programs.cached) == 1


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.two.running_mean = self.one.running_mean


def test_buffers_that_modules_share_are_shared_after_they_were_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, moved = Shares(), []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moved.append(device) or self.detach().clone())
    own_loop._move_buffers([model], torch.device("cuda"))
    assert moved and model.one.running_mean is model.two.running_mean


class Cached(nn.Module):
    """Keeps what it has seen in an object that it is given, as language models do while they generate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        y = self.linear(x) * self.scale
        if cache is not None:
            cache.seen.append(y)
            y = torch.stack(cache.seen).sum(0)
        return y


class Cache:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


def test_a_cache_and_many_lengths_run_without_gradients() -> None:
    torch.manual_seed(0)
    plain = Cached()
    model = Cached()
    model.load_state_dict(plain.state_dict())
    fully_shard(model, policy=Policy(lower="eager", cuda_graph=False, dynamic=False))
    caches = Cache(), Cache()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(X, cache=caches[0]), plain(X, cache=caches[1]))
        for rows in range(2, 13):
            model.scale = plain.scale = torch.tensor(float(rows))
            assert torch.equal(model(torch.ones(rows, 4)), plain(torch.ones(rows, 4)))
        assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))  # a buffer replaced in an eager call
    call = model._fsdp_compiled.calls["forward"]
    assert sum(one.kind == "forward" for one in call.programs.cached) == 8
    with pytest.raises(ValueError, match=r"holds a .*Cache"):
        model(X, cache=Cache())


def test_what_is_frozen_or_thawed_between_forward_and_backward() -> None:
    model, plain = net(), net()
    fully_shard(model)
    for frozen in (True, False):
        grads = []
        for one in (model, plain):
            one[0].requires_grad_(frozen)
            loss = loss_of(one)
            one[0].requires_grad_(not frozen)
            one(X).sum()  # a program for what is trained now comes between
            loss.backward()
            grads.append([parameter.grad for parameter in one.parameters()])
            one.zero_grad()
        assert [one is None for one in grads[0]] == [one is None for one in grads[1]]
        assert all(one is None or torch.equal(one.full_tensor(), other) for one, other in zip(*grads, strict=True))


def test_programs_are_kept_where_parameters_are_frozen_and_thawed() -> None:
    maker, judge = net(), nn.Linear(2, 1)
    fully_shard(maker)
    fully_shard(judge)
    for _ in range(3):
        for judging in (True, False):
            judge.requires_grad_(judging)
            judge(maker(X)).sum().backward()
            assert all((one.grad is not None) == judging for one in judge.parameters())
            assert all(one.grad is not None for one in maker.parameters())
            judge.zero_grad()
            maker.zero_grad()
    call = judge._fsdp_compiled.calls["forward"]
    assert sorted(made.programs.captures for made in call._known.values()) == [1, 1]
    labels = [label for made in call._known.values() for label in made.programs.labels]
    assert sum("0 of 2 trained" in label for label in labels) == 1


def test_a_parameter_of_nobodys_that_is_replaced_is_read_and_trained() -> None:
    model, plain = net(), net()
    fully_shard(model, ignored_params={model[2].bias})
    for value in (1.0, 2.0):
        for one in (model, plain):
            one[2].bias = nn.Parameter(torch.full((2,), value))
            loss_of(one).backward()
        assert torch.equal(loss_of(model), loss_of(plain))
        assert torch.equal(model[2].bias.grad, plain[2].bias.grad)


def tied_later(model: Any) -> Any:
    model(torch.randn(2, 6)).sum().backward()
    model[1].weight = model[0].weight
    return model(torch.randn(2, 6))


def dual(model: nn.Module) -> Any:
    """Forward differentiation, of the input."""
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(torch.randn(2, 6), torch.ones(2, 6)))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (lambda: fully_shard(net(), shard_placement_fn=lambda one: None), "shard_placement_fn"),
        (lambda: fully_shard(net(), reshard_after_forward=3), "reshard_after_forward=3"),
        (lambda: fully_shard(net(), policy=Policy(clip=1.0)), "clip_grad_norm_"),
        (lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])), "do not implement forward"),
        (lambda: fully_shard(fully_shard(net())), "before"),
        (lambda: copy.deepcopy(fully_shard(net())), "cannot be copied"),
        (lambda: fully_shard(net()).set_gradient_divide_factor(0.0), "positive number"),
        (lambda: fully_shard(net()).set_all_reduce_hook(print), "register_hook"),
        (lambda: torch.func.vjp(fully_shard(net()), torch.randn(2, 6)), "torch.func transform"),
        (lambda: dual(fully_shard(net())), "tangents would be lost"),
        (lambda: tied_later(fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))), "tied after fully_shard"),
        (lambda: fully_shard(nn.ParameterList([nn.Parameter(torch.ones(()))])), "scalar"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(what: Callable[[], Any], named: str) -> None:
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=named):
        what()


def test_a_rank_that_skips_a_backward_is_an_error_on_every_rank() -> None:
    said = launch(ROOT / "tests" / "workers" / "skipped_backward.py", 2)
    assert len(said) == 2
    assert all(one.startswith("RankError: ") and "different calls" in one for one in said), said


@pytest.mark.skipif(torch.__version__ < "2.13", reason="gradients of results come in a tuple")
@pytest.mark.parametrize("keeps", [False, True])
def test_the_gradient_of_what_is_returned_is_freed_when_it_was_read(keeps: bool) -> None:
    """Before what comes after it in backward is computed. The control holds it, by a hook."""
    alive: list[bool] = []
    seen: list[Any] = []

    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), policy=Policy(lower="eager"))
    x = torch.randn(64, 64)
    model(x).sum().backward()
    result = model(x)
    result.register_hook(lambda gradient: seen.append(gradient if keeps else weakref.ref(gradient)))

    class Last(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if seen:
                alive.append(keeps or seen[0]() is not None)
            return func(*args, **(kwargs or {}))

    loss = result.square().sum()
    with Last():
        loss.backward()
    assert alive[0] and alive[-1] == keeps


@pytest.mark.parametrize("retain", [False, True])
def test_backward_frees_activations_as_it_goes(retain: bool) -> None:
    """As eager PyTorch does: its peak is where backward begins. The control retains the graph, and so all of it."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(128, 128, bias=False), nn.Tanh())))
    model, x = copy.deepcopy(plain), torch.randn(128, 128)
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model, policy=Policy(lower="eager"))
    peaks = []
    for one in (plain, model):
        for _ in range(2):  # the first compiles, and each leaves gradients to add to
            one(x).sum().backward()
        one.zero_grad()
        with record() as recording:
            one(x).sum().backward(retain_graph=retain and one is model)
        peaks.append(recording.peak)
    assert (peaks[1] < peaks[0] + 0.3 * 8 * x.nbytes) == (not retain), [peak / x.nbytes for peak in peaks]
