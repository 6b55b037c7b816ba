"""Traced programs on disk: what is read equals what would be traced, and is read only where nothing has changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.capture import aot, aot_cache, disk_cache
from fsdp_compiled.capture.blocks import repeats
from fsdp_compiled.ir.nodes import describe
from fsdp_compiled.torch_private.names import UnsupportedTorch, plainly
from tests import architectures, equal_models, huggingface, models
from tests.chosen import chosen
from tests.models import Block, Recipe
from tests.modes import changed
from tests.toys import mse

TORCH = architectures.TORCH


class Watch:
    """In the place of `aot_cache.traced`: asks twice, compares what it gets, and counts what AOTAutograd traced."""

    def __init__(self) -> None:
        self.traced = 0
        self.compare = True

    def differentiate(self, *given: Any) -> aot.Traced:
        self.traced += 1
        return aot.differentiate(*given)

    def __call__(self, *given: Any) -> aot.Traced:
        first = aot_cache.traced(*given)
        if not self.compare:
            return first
        second = aot_cache.traced(*given)
        assert differences(first, second) == []
        return second


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(aot_cache, "differentiate", found.differentiate)
    monkeypatch.setattr(repeats, "traced", found)
    return found


def programs(folder: Path) -> list[Path]:
    return sorted((folder / "fsdp_compiled" / "programs").glob("*"))


def layouts(value: Any) -> Any:
    return fx.node.map_aggregate(
        value,
        lambda leaf: (
            (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, type(leaf).__name__)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
    )


def differences(left: aot.Traced, right: aot.Traced) -> list[str]:
    """How two captured programs differ, in anything that they hold."""
    if left.program.text() != right.program.text():
        return ["text"]
    found = [name for name in ("ports", "history", "notes", "needs")
             if getattr(left.program, name) != getattr(right.program, name)]  # fmt: skip
    names = {node.name: node for node in right.program.graph.nodes}
    for one, two in zip(left.program.graph.nodes, right.program.graph.nodes, strict=True):
        args = fx.node.map_arg((one.args, one.kwargs), lambda source: names[source.name])
        same = {
            "op": (one.op, one.name, one.target, one.type) == (two.op, two.name, two.target, two.type),
            "arguments": repr(args) == repr((two.args, two.kwargs)) and args == (two.args, two.kwargs),
            "users": [user.name for user in one.users] == [user.name for user in two.users],
            "value": layouts(one.meta.get("val")) == layouts(two.meta.get("val")) and describe(one) == describe(two),
            "meta": {**one.meta, "val": 0} == {**two.meta, "val": 0} and list(one.meta) == list(two.meta),
        }
        found += [f"{one.name} {what}" for what, equal in same.items() if not equal]
    if left.literals.keys() != right.literals.keys():
        found.append("literals")
    for name in left.literals.keys() & right.literals.keys():
        one, two = left.literals[name], right.literals[name]
        if layouts(one) != layouts(two) or not torch.equal(one, two):
            found.append(name)
    return found


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).view(1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(y.transpose(1, 2).reshape(5, 8))


TRACED_EACH_TIME = ("autograd.Function", "sizes in the data")
OWN = {"attention": (Attentive, mse)}
READ = (*TRACED_EACH_TIME, "attention", "literal tensors")  # and, beside those, kinds of blocks and T5 below


@pytest.mark.filterwarnings("ignore:an old name")
@pytest.mark.parametrize("case", chosen([*architectures.CASES, *OWN], READ))
def test_what_is_read_is_what_was_traced(watch: Watch, tmp_path: Path, case: str) -> None:
    make, loss = {**architectures.CASES, **OWN}[case]
    if loss is architectures.forces and TORCH < (2, 13):
        pytest.skip("traced from torch 2.13 on")
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.compare = case not in TRACED_EACH_TIME
    sharded = compile_sharded(model, optimizer, loss=loss, policy=Policy(lower="eager"))
    sharded.step(torch.randn(5, 8), torch.randn(5, 3))
    assert watch.traced == 1 and len(programs(tmp_path)) == (case not in TRACED_EACH_TIME)


@pytest.mark.parametrize("kind", chosen(models.BLOCKS, ["attention", "dropped", "normed", "tied inside"]))
def test_blocks_of_all_kinds_are_read_as_they_were_traced(watch: Watch, kind: str) -> None:
    """Frozen and tied weights, dropout and statistics; checkpointed where they can be."""
    recipe = Recipe(
        (Block(kind, checkpoint=kind in models.CHECKPOINTABLE), Block(kind, freeze="first")), tied_head=True, shard=1
    )
    model, optimizer = models.build(recipe)
    sharded = compile_sharded(model, optimizer, loss=models.loss, policy=recipe.policy)
    ((batch,),) = models.batches(recipe, 1)
    sharded.step(*batch)
    model.eval()
    sharded(batch[0])
    assert watch.traced == 2


# The one that differs most from the cases above; the others are for `make test-all`.
LARGER = [pytest.param(name, marks=() if name == "T5" else pytest.mark.exhaustive) for name in huggingface.MODELS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LARGER)
def test_architectures_of_transformers_are_read_as_they_were_traced(watch: Watch, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    if name == "T5" and TORCH < (2, 13):
        pytest.skip("Dynamo copies a configuration from torch 2.13 on")
    watch.compare = name != "Mixtral"  # which has an operator that is not PyTorch's
    sharded = compile_sharded(huggingface.build(name), loss=huggingface.loss, policy=Policy(lower="eager"))
    sharded.value_and_grad(*huggingface.MODELS[name].batch())
    assert watch.traced == 1 and len(programs(tmp_path)) == (name != "Mixtral")


def test_of_equal_blocks_a_few_are_on_disk(watch: Watch, tmp_path: Path) -> None:
    sizes = []
    for layers in (8, 16, 16):
        equal_models.program_of(equal_models.Model(layers=layers), equal_models.loss)
        sizes.append(sum(path.stat().st_size for path in programs(tmp_path)))
    assert watch.traced == len(programs(tmp_path)) == 2  # the third was read twice, and compared
    assert sizes[1] < 2.05 * sizes[0] and sizes[2] == sizes[1]


def test_a_program_that_was_read_another_way_is_noticed(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparison."""
    made = aot_cache._made

    def wrong(said: Any, leaf: Callable[[str, Any], Any]) -> Any:
        return made({"dtype": "float64"} if said == {"dtype": "float32"} else said, leaf)

    monkeypatch.setattr(aot_cache, "_made", wrong)
    with plainly(), pytest.raises(UnsupportedTorch, match="assert"):  # else it is tried again, when both are read
        step(Model())


# Of a key, each ingredient alone.


class Model(nn.Module):
    """Every line of it is in the key."""

    def __init__(self, slope: float = 0.1, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.slope = nn.Linear(width, 6), nn.Linear(6, 3), slope
        self.constant = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.second(F.leaky_relu(self.first(x), self.slope)), 0.1, self.training) * self.constant


def step(
    model: nn.Module,
    x: torch.Tensor | None = None,
    loss: Callable[..., torch.Tensor] = mse,
    **policy: Any,
) -> None:
    policy.setdefault("lower", "eager")
    sharded = compile_sharded(model, loss=loss, policy=Policy(**policy))
    x = torch.randn(5, 8) if x is None else x
    sharded.value_and_grad(x, torch.randn(len(x), 3, dtype=x.dtype))


def frozen() -> nn.Module:
    model = Model()
    model.first.bias.requires_grad_(False)
    return model


def other_constant() -> nn.Module:
    model = Model()
    model.constant = torch.ones(1, 3)
    return model


def renamed() -> nn.Module:
    model = Model()
    model.third = model.second
    del model.second
    model.__class__ = type("Model", (Model,), {"forward": lambda self, x: self.third(self.first(x)) * self.constant})
    return model


class Inside(nn.Module):
    """The same operators, in a module of another name."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        setattr(self, inner, Model())
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.inner)(x)


def absolute(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(model(x), y)


MODELS: dict[str, Callable[[], None]] = {
    "a number": lambda: step(Model(slope=0.2)),
    "a size": lambda: step(Model(width=9), torch.randn(5, 9)),
    "the batch": lambda: step(Model(), torch.randn(6, 8)),
    "the batch's strides": lambda: step(Model(), torch.randn(8, 5).T),
    "the batch's dtype": lambda: step(Model().double(), torch.randn(5, 8, dtype=torch.float64)),
    "what requires a gradient": lambda: step(frozen()),
    "a tensor that is closed over": lambda: step(other_constant()),
    "the loss": lambda: step(Model(), loss=absolute),
    "train or eval": lambda: step(Model().eval()),
    "the modules' names": lambda: step(renamed()),
}


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "determinism": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "the default dtype": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
    "functorch": lambda: torch._functorch.config.patch(view_replay_for_aliased_outputs=False),
    "the versions": lambda: mock.patch.object(aot_cache, "versions", lambda: {"torch": "3.0"}),
    "the sources": lambda: mock.patch.object(aot_cache, "versions", lambda: {"sources": "another hash"}),
    "the machine": lambda: mock.patch.object(aot_cache, "_machine", lambda: {"cpu": "another"}),
}


@pytest.mark.parametrize(
    "change", chosen(MODELS, ["a number", "the batch's strides", "the loss", "train or eval", "the modules' names"])
)
def test_a_change_of_the_model_or_the_batch_is_traced_anew(watch: Watch, change: str) -> None:
    watch.compare = False
    step(Model())
    MODELS[change]()
    assert watch.traced == 2
    step(Model())
    assert watch.traced == 2


def test_a_submodule_of_another_name_is_traced_anew(watch: Watch) -> None:
    watch.compare = False
    for inner in ("left", "right", "left"):
        step(Inside(inner))
    assert watch.traced == 2


@pytest.mark.parametrize("change", chosen(SETTINGS, ["determinism", "attention", "the versions", "the sources"]))
def test_a_change_of_a_setting_is_traced_anew(watch: Watch, tmp_path: Path, change: str) -> None:
    watch.compare = False
    step(Model())
    with SETTINGS[change](), mock.patch.object(aot_cache, "_serialized", lambda traced: b"none"):
        given = capture_arguments()
        before = watch.traced
        aot_cache.traced(*given)
    assert watch.traced == before + 1


def capture_arguments() -> Sequence[Any]:
    """What `aot_cache.traced` is called with for a step of `Model`."""
    found: list[Any] = []

    def stop(*given: Any) -> Any:
        found.extend(given)
        return aot.differentiate(*given)

    with mock.patch.object(repeats, "traced", stop):
        step(Model())
    return found


def test_operators_of_the_users_are_traced_each_time(watch: Watch, tmp_path: Path) -> None:
    watch.compare = False
    with torch.library._scoped_library("tests_keep", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeImplicitAutograd")

        class Doubled(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.ops.tests_keep.twice(super().forward(x))

        for count in (1, 2):
            step(Doubled())
            assert watch.traced == count
    assert programs(tmp_path) == []


def test_sizes_that_move_are_traced_each_time(watch: Watch, tmp_path: Path) -> None:
    watch.compare = False
    step(Model(), dynamic=True)
    assert watch.traced == 1 and programs(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "another program", "no program"])
def test_a_damaged_file_is_traced_anew_and_replaced(
    watch: Watch, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch.compare = False
    step(Model())
    (place,) = programs(tmp_path)
    content = disk_cache.read(place, lambda content: content)
    assert content is not None
    if damage == "cut":
        place.write_bytes(place.read_bytes()[:-10])
    elif damage == "another program":
        said = json.loads(content)
        said["nodes"][-2][2] = ["aten", "of_another_day", "default"]
        disk_cache.write(place, json.dumps(said).encode())
    else:
        disk_cache.write(place, b"{}")
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        step(Model())
    assert watch.traced == 2 and "it is made anew" in caplog.text
    step(Model())
    assert watch.traced == 2


def test_nothing_is_kept_where_inductor_keeps_nothing(watch: Watch, tmp_path: Path) -> None:
    watch.compare = False
    with torch._inductor.config.patch(fx_graph_cache=False):
        step(Model())
        step(Model())
    assert watch.traced == 2 and programs(tmp_path) == []


class Placed(torch.Tensor):
    """As a DTensor, it is more than its shape and strides."""


def test_what_computes_tensors_of_other_kinds_is_traced_each_time() -> None:
    def module(kind: type[torch.Tensor]) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.zeros(2)
        y = graph.call_function(torch.relu, (x,))
        y.meta["example_value"] = torch.zeros(2).as_subclass(kind)
        graph.output((y,))
        return fx.GraphModule(nn.Module(), graph)

    assert aot_cache._module(module(torch.Tensor))
    with pytest.raises(aot_cache._Unserializable):
        aot_cache._module(module(Placed))
