"""What forward is given and gives back under `fully_shard`: structures, caches, lengths, modules that are compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune, weight_norm
from torch.utils._pytree import tree_leaves

from fsdp_compiled import CaptureError, Policy, fully_shard
from fsdp_compiled.capture.dynamo_run import Trace
from fsdp_compiled.capture.side_effects import SideEffects
from tests.fully_shard_loops import X, full, loss_of, plain_gradients, same
from tests.toys import net


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


class Keyed(dict[str, Any]):
    """A dict whose attributes are its keys, as many projects have one. Nothing else can be asked of it."""

    __getattr__ = dict.__getitem__


def test_a_dict_whose_attributes_are_its_keys_comes_back() -> None:
    class Named(Heads):
        def forward(self, x: torch.Tensor) -> Any:
            return Keyed(one=self.one(x), inner=Keyed(two=self.two(x)), length=3)

    model = fully_shard(Named())
    found = model(X)
    assert type(found) is Keyed and type(found.inner) is Keyed and found.length == 3
    (found.one + found.inner.two).sum().backward()
    assert torch.allclose(model.two.weight.grad.full_tensor(), X.sum(0).expand(2, 4))


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


class Leaves(nn.Module):
    """Leaves the loss of a layer where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(4, 2), where
        self.found: Any = 0.0
        self.all: list[Any] = []
        self.last = torch.zeros(3, 2)

    def forward(self, x: torch.Tensor, into: Any = None) -> torch.Tensor:
        y = self.linear(x)
        left = y.square().mean()
        if self.where == "attribute":
            self.found = left
        elif self.where == "place of one like it":
            self.last = y
        elif self.where == "list":
            self.all.append(left)
        elif self.where == "argument":
            into.append(left)
        elif self.where == "taken":
            y = y * into.pop(0)
        elif self.where == "dictionary":
            into["loss"] = left
        elif self.where == "place":
            into[0] = (left, left)
        elif self.where == "batch":
            into["y"] = into.pop("x").double()
        return y


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "evaluates"])
@pytest.mark.parametrize("where", ["attribute", "place of one like it", "list"])
def test_tensors_that_forward_leaves_in_the_model_are_refused(where: str, trains: bool) -> None:
    """A loop would train without them."""
    model = fully_shard(Leaves(where))
    with torch.set_grad_enabled(trains), pytest.raises(CaptureError, match=r"Forward leaves tensors in .*Return them"):
        model(X)
    with torch.no_grad(), model.gathered():
        model(X)


INTO: dict[str, Callable[[], Any]] = {
    "argument": lambda: [1],
    "dictionary": lambda: {"loss": torch.zeros(()), "kept": [2]},
    "taken": lambda: [2.0, 1],
    "place": lambda: [None, 1],
    "batch": lambda: {"first": 0, "x": torch.ones(2)},
}


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "evaluates"])
@pytest.mark.parametrize("where", INTO)
@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
def test_what_forward_leaves_in_what_it_was_given_is_there_after_the_call(
    where: str, trains: bool, verify: bool
) -> None:
    """With its gradient, and with what it leaves alone as the same objects."""
    found = []
    torch.manual_seed(0)
    plain = Leaves(where)
    policy = Policy(lower="eager", cuda_graph=False, verify=verify)
    for model in (plain, fully_shard(copy.deepcopy(plain), policy=policy)):
        for _ in range(2):
            given = INTO[where]()
            before = {id(one) for one in (given.values() if isinstance(given, dict) else given)}
            with torch.set_grad_enabled(trains):
                y = model(X, given)
            values = list(given.values()) if isinstance(given, dict) else given
            left = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
            if trains and (moved := [one for one in left if one.requires_grad]):
                (y.sum() + sum(one.sum() for one in moved)).backward()
        gradient = [one.full_tensor() if isinstance(one, DTensor) else one
                    for one in [model.linear.weight.grad] if one is not None]  # fmt: skip
        found.append((list(given), [id(one) in before for one in values], left, gradient))
    assert found[0][:2] == found[1][:2]
    for one, other in zip([*found[0][2], *found[0][3]], [*found[1][2], *found[1][3]], strict=True):
        torch.testing.assert_close(one, other)


def test_control_a_call_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_compiled.runtime.fsdp.module_call.leave", lambda *_: None)
    given = INTO["argument"]()
    fully_shard(Leaves("argument"))(X, given)
    assert given == [1]


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, int]:
        y = x[wanted]
        return self.linear(y), y.shape[0]


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "evaluates"])
def test_a_size_that_is_in_the_data_is_returned_as_a_number(trains: bool) -> None:
    torch.manual_seed(0)
    plain = Sized()
    model = fully_shard(copy.deepcopy(plain))
    for wanted in ([True, False, True], [True, True, True], [False, False, True]):
        with torch.set_grad_enabled(trains):
            (mine, rows), (theirs, expected) = (one(torch.ones(3, 4), torch.tensor(wanted)) for one in (model, plain))
        assert rows == expected == sum(wanted)
        torch.testing.assert_close(mine, theirs)
        if trains:
            (mine.sum() / rows).backward()
            (theirs.sum() / expected).backward()
    if trains:
        assert same(full(one.grad for one in model.parameters()), [one.grad for one in plain.parameters()])


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("hook", [weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
def test_a_weight_that_is_made_before_each_call_is_not(hook: Callable[[nn.Module], Any]) -> None:
    plain, model = net(), net()
    for one in (plain, model):
        hook(one[0])
    fully_shard(model)
    for one in (plain, model):
        loss_of(one).backward()
    gradients = [one.grad for one in plain.parameters()]
    assert all(map(torch.allclose, full(one.grad for one in model.parameters()), gradients))


def test_control_where_it_is_not_asked_a_loop_goes_on_with_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SideEffects, "lost", lambda *_: [])
    model = fully_shard(Leaves("attribute"))
    model(X)
    assert model.found == 0.0


def test_where_nothing_is_left_nobody_works_out_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which writes out all blocks, and looks at each of their operators; the second is the control."""
    asked: list[Trace] = []
    tables = Trace.tables

    def counting(self: Trace) -> dict[int, str]:
        asked.append(self)
        return tables(self)

    monkeypatch.setattr(Trace, "tables", counting)
    loss_of(fully_shard(net())).backward()
    assert not asked
    with pytest.raises(CaptureError):
        fully_shard(Leaves("attribute"))(X)
    assert asked


def test_a_slice_of_a_container_is_of_its_own_class() -> None:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    assert type(model[1:]) is nn.Sequential and type(model[:1][0]) is type(model[0])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.one(x) * self.two(x))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(64, 64), nn.ModuleList(Twice() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return h


def test_gradients_of_a_block_that_reads_its_input_twice_add_up_as_in_eager_pytorch() -> None:
    x, found = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)), []
    for shards in (False, True):
        model = Residual()
        for one in [*model.blocks, model] if shards else []:
            fully_shard(one)
        model(x).square().mean().backward()
        found.append([full([one.grad])[0] if shards else one.grad for one in model.parameters()])
    assert same(*found)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(x).tanh()
        return {"features": features, "logits": self.head(features)}


@pytest.mark.parametrize("watched", ["features", "logits"])
@pytest.mark.parametrize("watch", ["retain_grad", "hook"])
@pytest.mark.parametrize("trained", [("features",), ("logits",), ("features", "logits")])
def test_who_watches_a_result_sees_all_of_its_gradient_or_an_error(
    watched: str, watch: str, trained: tuple[str, ...]
) -> None:
    if watched not in trained and watched == "logits":
        pytest.skip("nothing comes to it")
    torch.manual_seed(0)
    plain = Features()

    def trebled(gradient: torch.Tensor | None) -> torch.Tensor | None:  # None: autograd has none here
        return None if gradient is None else 3 * gradient

    def gradients(model: Features) -> list[torch.Tensor]:
        out = model(X)
        out[watched].retain_grad() if watch == "retain_grad" else out[watched].register_hook(trebled)
        torch.stack([out[name].square().sum() for name in trained]).sum().backward()
        kept = [out[watched].grad] if watch == "retain_grad" else []
        return [one.full_tensor() if isinstance(one, DTensor) else one for one in (*kept, model.body.weight.grad)]

    expected, model = gradients(plain), fully_shard(copy.deepcopy(plain))
    model.zero_grad()
    if watched == "features" and "logits" in trained:
        with pytest.raises(RuntimeError, match="also depends on it through result 1"):
            gradients(model)
    else:
        assert all(map(torch.allclose, gradients(model), expected))
