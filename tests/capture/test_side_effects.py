"""What forward and the loss leave on Python objects: undone, kept from step to step, or refused by name."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fsdp_compiled import Policy, compile_sharded
from tests.chosen import TORCH, chosen

Loss = Callable[..., torch.Tensor]
GLOBAL_LOG: list[torch.Tensor] = []
GLOBAL_COUNT = 0
NUMBERS = itertools.count(1)
OLDER = TORCH < (2, 13)


@pytest.fixture(autouse=True)
def _from_nothing() -> None:
    global GLOBAL_COUNT
    GLOBAL_COUNT = Model.total = 0
    GLOBAL_LOG.clear()


@dataclasses.dataclass
class Box:
    value: Any = None
    calls: int = 0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __repr__(self) -> str:
        return f"Slotted({self.calls})"


class Model(nn.Module):
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.rate, self.first = 0, 1.0, True
        self.last: Any = None
        self.log: list[Any] = []
        self.cache: dict[str, Any] = {}
        self.nested: dict[str, Any] = {"a": {"b": []}, "n": 0}
        self.recent: collections.deque[Any] = collections.deque(maxlen=2)
        self.grouped: dict[str, Any] = collections.defaultdict(list)
        self.ordered: dict[str, Any] = collections.OrderedDict(x=0, y=1)
        self.seen: set[str] = set()
        self.box, self.slotted = Box(), Slotted()
        self.mean, self.other = torch.zeros(4), torch.ones(4)
        self.same = self.mean
        self.pair = (torch.zeros(4), torch.ones(4))
        self.named = {"mean": torch.zeros(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def step(loss: Loss, model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of eager PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        return value.detach()

    return run


def sharded_of(loss: Loss, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))


def as_eager(loss: Loss) -> Model:
    """Five steps, the last ones of another shape, are eager PyTorch's; the model that was trained."""
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    sharded, eager = sharded_of(loss, model), step(loss, plain)
    for x in [torch.randn(3, 4) for _ in range(3)] + [torch.randn(2, 4) for _ in range(2)]:
        torch.testing.assert_close(sharded.step(x), eager(x), rtol=1e-6, atol=1e-6)
    return model


def kept(model: Model) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(model).items() if not name.startswith("_")}


def everything(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Leaves tensors and numbers wherever Python can hold them, and reads none of it."""
    global GLOBAL_COUNT
    y = model(x)
    model.last, model.new = y, (y, {"x": x})
    model.log.append({"loss": y.sum()})
    model.cache["h"] = y
    model.nested["a"]["b"].append([y])
    model.nested["n"] += 1
    model.recent.append(y)
    model.grouped["h"].append(y)
    model.ordered["z"] = y
    model.seen.add("h")
    model.box.value = Box(y)
    model.box.calls += 1
    model.slotted.calls += 1
    model.calls += 1
    Model.total += 1
    GLOBAL_COUNT += 1
    GLOBAL_LOG.append(y)
    return y.square().mean()


@pytest.mark.skipif(OLDER, reason="its Dynamo refuses, by name, what sets an attribute of a class")
def test_what_is_only_kept_is_undone_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    before = kept(Model())
    counts = []

    def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
        counts.append(len(counts))
        return everything(model, x)

    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        torch.manual_seed(0)
        model, plain = Model(), Model()
        plain.load_state_dict(model.state_dict())
        sharded = sharded_of(loss, model)
        xs = [torch.randn(rows, 4) for rows in (3, 3, 2, 2, 5)]
        found = [sharded.step(x) for x in xs]
    assert kept(model) == before and not hasattr(model, "new")
    assert not GLOBAL_LOG and not GLOBAL_COUNT and not Model.total and not counts
    assert list(model.ordered) == ["x", "y"] and model.recent.maxlen == 2
    names = (
        "last new log cache['h'] nested['a']['b'] recent grouped ordered['z'] box.value test_side_effects.GLOBAL_LOG"
    )
    keeping, counting = [record.getMessage() for record in caplog.records if "forward" in record.getMessage()]
    assert all(name in keeping for name in names.split()), keeping
    numbers = "nested['n'] seen box.calls slotted.calls calls Model.total test_side_effects.GLOBAL_COUNT counts"
    assert all(name in counting for name in numbers.split(" ")), counting
    assert "calls from 0 to 1" in counting
    eager = step(loss, plain)
    torch.testing.assert_close(found, [eager(x) for x in xs], rtol=1e-6, atol=1e-6)
    assert plain.calls == 5 and len(GLOBAL_LOG) == 5  # what eager PyTorch does


def average(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    model.mean = 0.9 * model.mean + 0.1 * y.detach().mean(0)
    return (y - model.mean).square().sum()


def average_in_a_dictionary(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    model.named["mean"] = 0.9 * model.named["mean"] + 0.1 * y.detach().mean(0)
    return (y - model.named["mean"]).square().sum()


def pair(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    model.pair = (0.5 * model.pair[0] + y.detach().mean(0), model.pair[1] * 0.5)
    return (y - model.pair[0] - model.pair[1]).square().sum()


def table(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Built at the first call, from nothing, and found at the others."""
    if model.last is None:
        model.last = torch.zeros(4)
        model.last[1:] = torch.arange(3.0).cos()
    if not hasattr(model, "mask"):
        model.mask = torch.ones(4, 4).tril_()
    return (model(x) * model.last @ model.mask).square().mean()


def features(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.log.clear()
    y = model(x)
    model.log.append(y.mean())
    model.cache["y"] = y
    return sum(model.log) + model.cache["y"].square().mean()


def said_once(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.first:
        print("the first call")
        model.first = False
    return model(x).square().mean()


@pytest.mark.parametrize(
    "loss",
    chosen([average, average_in_a_dictionary, pair, table, features, said_once], [average, pair, table, said_once]),
)
def test_state_tables_and_what_one_call_alone_reads_are_as_in_eager_pytorch(loss: Loss) -> None:
    model = as_eager(loss)
    tensors = [value for value in pytree.tree_leaves(dict(vars(model))) if isinstance(value, torch.Tensor)]
    assert tensors and not any(isinstance(value, FakeTensor) for value in tensors)


def from_the_cache(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    total = y + model.cache["h"] if "h" in model.cache else y
    model.cache["h"] = y.detach()
    return total.square().mean()


def none_at_first(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    total = y if model.last is None else y + model.last
    model.last = y.detach()
    return total.square().mean()


def noise_at_first(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.last is None:
        model.last = torch.randn(4)
    return (model(x) * model.last).square().mean()


def after_three(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return model(x).square().mean() * (2 if model.calls > 3 else 1)


def at_the_77th(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.nested["n"] += 1
    return model(x).square().mean() if model.nested["n"] != 77 else model(x).mean()


def scaled_by_calls(model: Model, x: torch.Tensor) -> torch.Tensor:
    global GLOBAL_COUNT
    GLOBAL_COUNT += 1
    return model(x).square().mean() / GLOBAL_COUNT


def decaying(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.rate *= 0.5
    return model(x).square().mean() * model.rate


def warming(model: Model, x: torch.Tensor) -> torch.Tensor:
    factor = 2 if model.first else 1
    model.first = False
    return model(x).square().mean() * factor


def long_log(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.log.append(0)
    return model(x).square().mean() * (2 if len(model.log) > 3 else 1)


def sum_of_log(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.log.append(model(x).square().mean())
    return sum(model.log)


def sliding(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x).square().mean()
    model.recent.append(y.detach())
    return y + sum(model.recent)


def growing(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    model.mean = torch.cat([model.mean, y.detach().mean(0)])
    return y.square().mean() + model.mean.mean()


def swapping(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.mean, model.other = model.other, model.mean
    return (model(x) - model.mean).square().mean()


def sharing(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x) * model.same
    model.mean = model.mean + 1
    return (y - model.mean).square().mean()


def drawing(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() * next(NUMBERS)


DEPENDS = {
    from_the_cache: r"cache\['h'\]",
    none_at_first: "last",
    noise_at_first: "last",
    after_three: r"calls from 0 to 1(.|\n)*buffer(.|\n)*in after_three",
    at_the_77th: r"nested\['n'\] from 0 to 1(.|\n)*buffer(.|\n)*in at_the_77th",
    scaled_by_calls: "GLOBAL_COUNT from 0 to 1",
    decaying: "rate from 1.0 to 0.5",
    warming: "first from True to False",
    long_log: "log",
    sum_of_log: "log",
    sliding: "recent",
    growing: r"reads mean and replaces float32\[4\] on cpu by float32\[8\]",
    swapping: "reads other and replaces a tensor by one that was there before",
    sharing: "reads and changes",
    drawing: "NUMBERS, a count, which moves on",
}


@pytest.mark.parametrize("loss", [one for one in DEPENDS if not (OLDER and one is drawing)])
def test_what_the_next_call_would_read_is_refused_and_nothing_is_changed(loss: Loss) -> None:
    torch.manual_seed(0)
    model = Model()
    before = kept(model)
    sharded = sharded_of(loss, model)
    for rows in (3, 2)[: 1 + (loss is after_three)]:
        with pytest.raises(ValueError, match=f"Forward .*{DEPENDS[loss]}"):
            sharded.step(torch.randn(rows, 4))
    assert kept(model) == before and not GLOBAL_COUNT
    assert sharded.captures == 0


def test_the_variables_of_a_closure_are_named() -> None:
    calls = 0

    def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return model(x).square().mean() * calls

    with pytest.raises(ValueError, match="loss's calls from 0 to 1"):
        sharded_of(loss, Model()).step(torch.randn(3, 4))
    assert calls == 0
