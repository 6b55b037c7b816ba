"""What a script does beside the plain loop with `fully_shard`: as eager PyTorch, or refused; in a world of one."""

from __future__ import annotations

import copy
import enum
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from fsdp_compiled import FSDPModule, Policy, compile_sharded, fully_shard, register_fsdp_forward_method
from fsdp_compiled.runtime.fsdp.fully_shard import _move_buffers
from tests.fully_shard_loops import X, full, loss_of, plain_gradients, same
from tests.launch import ROOT, launch
from tests.toys import net


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
    assert model(X).dtype == torch.bfloat16


def test_a_wrapper_that_leaves_itself_out_of_names() -> None:
    """`checkpoint_wrapper`'s, of a module that is called alone, and of one that is taken over."""
    model, taken, plain = checkpoint_wrapper(net()), checkpoint_wrapper(net()), net()
    fully_shard(nn.Sequential(fully_shard(model), nn.Linear(2, 2)))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, taken, plain)]
    sharded = compile_sharded(taken, optimizers.pop(1), loss=loss_of, policy=Policy(lower="eager"))
    for _ in range(2):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            loss_of(one).backward()
            optimizer.step()
            optimizer.zero_grad()
        sharded.step()
    assert same(full(model.parameters()), plain.parameters())
    found = sharded.full_state_dict()
    assert list(found) == list(plain.state_dict()) and same(found.values(), plain.parameters())


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


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.two.running_mean = self.one.running_mean


def test_buffers_that_modules_share_are_shared_after_they_were_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, moved = Shares(), []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moved.append(device) or self.detach().clone())
    _move_buffers([model], torch.device("cuda"))
    assert moved and model.one.running_mean is model.two.running_mean


def test_modules_that_are_moved_compute_where_they_are_now() -> None:
    """Names and shapes are as before: two places change their modules, then two have the same one, then as at first."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    fully_shard(model)
    first, parts = list(plain), list(model)
    for order in ((0, 1, 2), (1, 0, 2), (1, 1, 2), (0, 1, 2)):
        for place, index in enumerate(order):
            model[place], plain[place] = parts[index], first[index]
        losses = [loss_of(one) for one in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for ours, theirs in zip(parts, first, strict=True):
            if theirs.weight.grad is None:
                assert ours.weight.grad is None
            else:
                assert torch.equal(ours.weight.grad.full_tensor(), theirs.weight.grad)
        for part in (*parts, *first):
            part.zero_grad()


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


def test_parameters_in_whose_places_results_of_them_stand() -> None:
    """By `functional_call`: without gradients they are read; with them, those would have gone to the results."""
    model, plain = fully_shard(net()), net()

    def scaled(one: nn.Module) -> torch.Tensor:
        values = {name: parameter * 1.1 for name, parameter in one.named_parameters()}
        return torch.func.functional_call(one, values, (X,)).square().mean()  # type: ignore[no-any-return]

    with torch.no_grad():
        assert torch.equal(scaled(model), scaled(plain))
    with pytest.raises(ValueError, match=r"Linear\.weight was replaced by a result of .*functional_call"):
        scaled(model)
    loss_of(model).backward()
    assert same(full(one.grad for one in model.parameters()), plain_gradients())


def tied_later(model: Any) -> Any:
    model(torch.randn(2, 6)).sum().backward()
    model[1].weight = model[0].weight
    return model(torch.randn(2, 6))


def hooked_late(model: Any) -> None:
    loss = loss_of(model)
    model.set_all_reduce_hook(print)
    loss.backward()


def with_a_part_in_common() -> list[nn.Module]:
    part = nn.Linear(6, 6)
    return [nn.Sequential(part, nn.Linear(6, 6)), nn.Sequential(part, nn.Linear(6, 6))]


def on_a_mesh(parameter: nn.Parameter) -> Any:
    """As FSDP2's `ShardPlacementResult`."""
    return SimpleNamespace(placement=None, mesh_info=object())


def left_behind(model: Any) -> None:
    """Backward through a whole parameter that is none any more."""
    model.unshard()
    result = model[0].weight.square()
    model.reshard()
    result.sum().backward()


def dual(model: nn.Module) -> Any:
    """Forward differentiation, of the input."""
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(torch.randn(2, 6), torch.ones(2, 6)))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (
            lambda: fully_shard(net(), shard_placement_fn=lambda one: Shard(1)),
            r"\(dim=1\) for \w+\.bias, of shape \[8\]",
        ),
        (lambda: fully_shard(net(), shard_placement_fn=lambda one: Replicate()), r"expected None or Shard\(dim\)"),
        (lambda: fully_shard(net(), shard_placement_fn=on_a_mesh), "gives another mesh for"),
        (lambda: fully_shard(net(), reshard_after_forward=3), "reshard_after_forward is 3"),
        (lambda: fully_shard(net(), policy=Policy(clip=1.0)), "clip_grad_norm_"),
        (lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])), "do not implement forward"),
        (lambda: fully_shard(fully_shard(net())), "before"),
        (lambda: fully_shard(fully_shard(net())[0]), "Linear.weight was sharded by an earlier call of fully_shard"),
        (lambda: [fully_shard(one) for one in with_a_part_in_common()], "where modules share a part, on that part"),
        (lambda: copy.deepcopy(fully_shard(net())), "cannot be copied"),
        (lambda: fully_shard(net()).set_gradient_divide_factor(0.0), "positive number"),
        (lambda: fully_shard(net()).set_custom_all_gather(print), "programs make their own collectives"),
        (lambda: hooked_late(fully_shard(net())), "set_all_reduce_hook was called on a FSDPSequential between"),
        (lambda: left_behind(fully_shard(net())), "was given a gradient while it was unsharded"),
        (lambda: torch.func.vjp(fully_shard(net()), torch.randn(2, 6)), "torch.func transform"),
        (
            lambda: fully_shard(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)))(
                torch.randn(2, 6).requires_grad_()
            ),
            "Cure: forward writes an input that requires a gradient",
        ),
        (lambda: dual(fully_shard(net())), "tangents would be lost"),
        (lambda: tied_later(fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))), "tied after fully_shard"),
        (lambda: fully_shard(nn.ParameterList([nn.Parameter(torch.ones(()))])), "scalar"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(what: Callable[[], Any], named: str) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError), match=named):
        what()


class Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_forward_that_fails_leaves_buffers_as_they_were() -> None:
    model = fully_shard(Counted())
    model(torch.ones(2, 6))
    with pytest.raises(ValueError, match="failed while it was traced"):
        model(torch.ones(2, 5))
    assert model.calls == 1
    model(torch.ones(2, 6))
    assert model.calls == 2


class Gated(nn.Module):
    """With gates of one element, which no shard holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(6, 6), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for gate in (self.first, self.second):
            nn.init.ones_(gate.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.first.weight + self.second.weight).square().mean()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "replaced"])
def test_an_equal_parameter_of_one_element_in_the_place_of_another_is_seen(tied: bool) -> None:
    torch.manual_seed(0)
    plain = Gated()
    model = copy.deepcopy(plain)
    fully_shard(model, ignored_params={model.first.weight, model.second.weight})
    for one in (plain, model):
        one(torch.ones(2, 6)).backward()
        one.zero_grad()
        one.second.weight = one.first.weight if tied else nn.Parameter(torch.ones(1, 1))
        one(torch.ones(2, 6)).backward()
    assert model.second.weight.grad is not None
    torch.testing.assert_close(model.second.weight.grad, plain.second.weight.grad)
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)


class How(enum.Enum):
    SUM = 1
    DIFFERENCE = 2

    def __repr__(self) -> str:
        return "how"


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor, how: How = How.SUM) -> torch.Tensor:
        return self.one(x) + self.two(y) if how is How.SUM else self.one(x) - self.two(y)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x)


def test_a_method_is_checked_by_its_own_arguments() -> None:
    model, x = Chooses(), torch.randn(2, 6)
    expected = model.encode(x)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    assert torch.equal(model.encode(x), expected)
    with pytest.raises(ValueError, match=r"Chooses.encode does not take this batch.*\n  Expected: \(x\)"):
        model.encode(x, x)


def test_each_member_of_an_enum_is_a_program_of_its_own() -> None:
    model, x = Chooses(), torch.randn(2, 6)
    expected = [model(x, x, how) for how in How]
    fully_shard(model)
    assert all(torch.equal(model(x, x, how), one) for how, one in zip(How, expected, strict=True))
    assert not torch.equal(*expected)


@pytest.mark.parametrize("placement", [None, Shard(0), Shard(-1)])
def test_a_placement_is_asked_for_once_a_parameter(placement: Shard | None) -> None:
    plain, asked = net(), []
    model = copy.deepcopy(plain)
    fully_shard(model, shard_placement_fn=lambda one: asked.append(one.shape) or placement)
    assert asked == [one.shape for one in plain.parameters()]
    x = torch.randn(2, 4)
    assert torch.equal(model(x), plain(x))


def test_a_rank_that_skips_a_backward_is_an_error_on_every_rank() -> None:
    said = launch(ROOT / "tests" / "workers" / "skipped_backward.py", 2)
    assert len(said) == 2
    assert all(one.startswith("RankError: ") and "different calls" in one for one in said), said
    assert all("then RankError: An earlier call failed for good:" in one for one in said), said


def test_a_loss_that_is_mixed_with_sharded_parameters_says_how() -> None:
    model = fully_shard(net())
    penalty = sum(one.abs().sum() for one in model.parameters())
    loss_of(model).backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"was given a DTensor: .* Make that a plain tensor first: .*full_tensor"):
        (model(X).mean() * penalty).backward()
    plain = net()
    for one, two in ((model, penalty.full_tensor()), (plain, sum(one.abs().sum() for one in plain.parameters()))):
        (one(X).mean() * two).backward()
    assert same(full(one.grad for one in model.parameters()), (one.grad for one in plain.parameters()))


class InPlace(torch.autograd.Function):
    """A backward that writes the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(2).sub_(0.01)


class NotInPlace(InPlace):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient.mul(2)
        return gradient.sub(0.01)


class Applies(nn.Module):
    def __init__(self, last: bool, function: Any = InPlace) -> None:
        super().__init__()
        self.net, self.last, self.function = net(), last, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = (
            self.function.apply(self.net(x)) if self.last else self.net(self.function.apply(x * self.net[0].bias[0]))
        )
        return found + self.function.apply(found)


@pytest.mark.parametrize("last", [False, True])
def test_a_backward_that_writes_its_gradient_in_place(last: bool) -> None:
    gradients = []
    for function in (InPlace, NotInPlace):
        plain = Applies(last, function)
        loss_of(plain).backward()
        gradients.append([one.grad for one in plain.parameters()])
    model, taken = fully_shard(Applies(last)), Applies(last)
    loss_of(model).backward()
    before = [one.detach().clone() for one in taken.parameters()]
    assert same(full(one.grad for one in model.parameters()), gradients[0])
    sharded = compile_sharded(
        taken, torch.optim.SGD(taken.parameters(), lr=1.0), loss=loss_of, policy=Policy(lower="eager")
    )
    sharded.step()
    now = sharded.full_state_dict().values()
    assert same(now, [one - gradient for one, gradient in zip(before, gradients[0], strict=True)])
    assert not same(*gradients)


def test_a_call_without_a_process_group_says_so() -> None:
    model = fully_shard(net())
    model(torch.randn(2, 4))
    torch.distributed.destroy_process_group()
    with pytest.raises(RuntimeError, match="There is no process group any more"):
        model(torch.randn(2, 4))


def test_a_name_that_was_removed_says_what_to_do_instead() -> None:
    with pytest.raises(ImportError, match="Use the optimizer as it is"):
        from fsdp_compiled import compile_optimizer  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name"):  # as any other that is not there
        from fsdp_compiled import compile_everything  # type: ignore[attr-defined]  # noqa: F401


def test_a_forward_of_the_class_that_is_replaced_is_what_runs() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w(x)  # type: ignore[no-any-return]

    before, x = fully_shard(Own()), torch.ones(2, 4)
    first = before(x)
    Own.forward = lambda self, x: self.w(x) * 10  # type: ignore[method-assign]
    torch.testing.assert_close(before(x), first * 10)
    new = Own()
    expected = new(x).detach()
    torch.testing.assert_close(fully_shard(new)(x), expected)


def test_recurrent_layers_keep_no_whole_weights() -> None:
    model = nn.LSTM(4, 4)
    alive = [weakref.ref(one) for one in model.parameters()]
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(3, 2, 4))[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert not any(one() is not None for one in alive)


def test_an_optimizer_without_groups_is_none_of_ours() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

    model, other = net(), net()
    wrapped = Wrapper(torch.optim.SGD(other.parameters(), 0.1))
    assert fully_shard(model)(X).requires_grad and wrapped.inner is not None
