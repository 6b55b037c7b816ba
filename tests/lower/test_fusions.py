"""Fusions change how a program runs, and not what it means; what is printed is what runs."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compiled
from fsdp_compiled import Plan, Policy, Program, Sharded, compile_sharded
from fsdp_compiled.ir.edit import Edit
from fsdp_compiled.lower.fusions import FUSIONS, Target, check_names, fusions_for
from fsdp_compiled.lower.fusions.reductions import exchange
from fsdp_compiled.passes import run as run_passes
from tests import simulate
from tests.models import Block, Recipe
from tests.recipes import trained
from tests.simulate import Simulation
from tests.toys import batches, mse, sgd, squares

NAMES = tuple(FUSIONS)
BY_KERNELS = ("compute_copies", "flatten_gradients", "microbatch_sums", "gradient_statistics", "optimizer_update")
CLOSE = 1e-6  # relative, by tensor norm: the norm and the update's scalars are rounded in another order
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# What each fusion puts in, by which it is seen in the program's text.
SEEN = {
    "compute_copies": r"copy_\w+: bfloat16",
    "flatten_gradients": r"fsdp_compiled\.flatten\(",
    "microbatch_sums": r"fsdp_compiled\.accumulate_\(",
    "gradient_statistics": r"fsdp_compiled\.measure\(|accumulate_\(\[.*\], \[.*\], \w+, ",
    "optimizer_update": r"fsdp_compiled\.adam_\(",
    "exchange": r"all_to_all_single\(.*(?s:.)*combine\(",
    "direct_gradients": r"fsdp_compiled\.product_\(",
    "sum_reductions": r"_reduce\w*: .*\(.*'sum'",
    "in_place_all_reduce": r"all_reduce_\(",
}


def recipe(shard: str, without: Any = (), **options: Any) -> Recipe:
    policy = Policy(
        shard=shard, lower="eager", bucket_mb=0, clip=0.05, kernels=True, copies=True, precision=BF16, without=without,
        **options,
    )  # fmt: skip
    return Recipe((Block("linear"), Block("unreached")), policy=policy, optimizer="adamw", groups="two")


@functools.cache
def result(shard: str, without: Any, microbatches: int) -> Simulation:
    return trained(recipe(shard, without), 2, microbatches)


def furthest(mine: Simulation, other: Simulation) -> float:
    pairs = [*zip(mine.losses, other.losses, strict=True)]
    pairs += [(value, other.parameters[name]) for name, value in mine.parameters.items() if value.numel()]
    return max(((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)).item() for a, b in pairs)


def seen(program: Program) -> set[str]:
    return {name for name, pattern in SEEN.items() if re.search(pattern, program.text())}


# One by one.


@pytest.mark.parametrize(
    ("shard", "alone"),
    [*(("zero1", name) for name in BY_KERNELS), *((shard, None) for shard in ("zero3", "zero2", "zero1", "ddp"))],
)
def test_each_alone_and_all_together_train_as_none_do(shard: str, alone: str | None) -> None:
    """In the last microbatch of a row; its text shows the fusions that ran, and no others."""
    without = tuple(name for name in NAMES if alone is not None and name != alone)
    plain, fused = result(shard, "all", 2), result(shard, without, 2)
    assert furthest(fused, plain) < CLOSE
    wanted = {alone} if alone is not None else {*BY_KERNELS, "sum_reductions", "in_place_all_reduce"}
    assert seen(fused.program) == wanted and seen(plain.program) == set()
    assert {name for name in fused.program.history if name in NAMES} == wanted
    assert {name for name in plain.program.history if name in NAMES} == set()
    if alone == "compute_copies":  # which rounds nothing
        assert all(torch.equal(value, plain.parameters[name]) for name, value in fused.parameters.items())


@pytest.mark.parametrize("world", [(2, 1), (4, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("shard", ["zero3", "ddp"])
def test_sums_over_ranks_are_the_means(shard: str, world: tuple[int, int]) -> None:
    """Bit for bit where ranks are a power of two; one division for all axes, and one number for all buffers."""

    def ran(*without: str) -> Simulation:
        policy = Policy(shard=shard, lower="eager", bucket_mb=0, kernels=True, without=without)
        return trained(Recipe((Block("linear"),), policy=policy, shard=world[0], replicate=world[1]), 2)

    sums, means = ran(), ran("sum_reductions")
    assert furthest(sums, means) <= (CLOSE if world[0] == 3 else 0)
    text = sums.program.text()
    assert "'avg'" not in text and "'avg'" in means.program.text()
    assert len(re.findall(rf"full\(\[\], {1 / (world[0] * world[1])}", text)) == 1


def test_a_mean_of_gradients_in_float64_is_divided_in_float64() -> None:
    steps = [[(x.double(), y.double()) for x, y in batches(3)] for _ in range(2)]

    def ran(*without: str) -> Simulation:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 2).double()
        policy = Policy(lower="eager", bucket_mb=0, kernels=True, without=without)
        return simulate.simulate(model, sgd(model), mse, steps, policy, shard=3)

    sums, means = ran(), ran("sum_reductions")
    assert "'avg'" not in sums.program.text() and furthest(sums, means) < 1e-13


def test_another_program_is_noticed() -> None:
    """The control of the test above."""

    def shifted(program: Program, plan: Plan) -> Program:
        edit = Edit(program)
        node = next(node for node in edit.graph.nodes if "adam_" in str(node.target))
        node.kwargs = {**node.kwargs, "beta1": 0.8}
        return edit.done("broken")

    assert furthest(trained(recipe("zero3"), 2, damage=shifted), result("zero3", "all", 1)) > 1e-4


@pytest.mark.parametrize(("name", "world"), [("exchange", (3, 1)), ("exchange", (3, 2)), ("direct_gradients", (2, 2))])
def test_those_for_compiled_steps_train_as_none_do(name: str, world: tuple[int, int]) -> None:
    """Their operators run node by node as well."""
    policy = Policy(shard="zero3", lower="eager", bucket_mb=0, kernels=True, without=("sum_reductions",))  # a later one
    what = Recipe((Block("linear"),), policy=policy, shard=world[0], replicate=world[1])

    def fuse(program: Program, plan: Plan) -> Program:
        others = tuple(one for one in NAMES if one != name)
        compiled = replace(plan, policy=replace(plan.policy, lower="inductor", without=others))
        wanted = fusions_for(Target(compiled, (), True, gloo=("shard",) if name == "exchange" else ()))
        assert len(wanted) == 1
        fused = run_passes(program, plan, wanted)
        assert name in seen(fused)
        return fused

    plain, fused = trained(what, 2), trained(what, 2, damage=fuse)
    assert furthest(fused, plain) <= (0 if name == "direct_gradients" else CLOSE)


def test_which_suit_what() -> None:
    plan = simulate.stages(*_model(), squares, (torch.ones(2, 6),), Policy(bucket_mb=0))[1]

    def names(gloo: tuple[str, ...] = (), trains: bool = True, tuned: bool = False, **policy: Any) -> list[str]:
        target = Target(replace(plan, policy=replace(plan.policy, **policy)), (), trains, gloo, tuned)
        return [name for name, make in FUSIONS.items() if make(target) is not None]

    over = ("shard",)
    assert names(over) == ["exchange", "in_place_all_reduce"]
    assert names() == ["in_place_all_reduce"] == names(over, lower="eager")
    assert names(over, kernels=True, precision=BF16) == list(NAMES)
    assert "compute_copies" not in names(over, kernels=True, precision=BF16, trains=False)
    assert "direct_gradients" not in names(tuned=True, kernels=True)
    assert "optimizer_update" not in names(over, kernels=True, offload=True)
    assert len(fusions_for(Target(plan, (), True, over))) == 2
    without = replace(plan, policy=replace(plan.policy, without=("exchange", "in_place_all_reduce")))
    assert fusions_for(Target(without, (), True, over)) == ()


def test_a_name_that_no_fusion_has_is_refused() -> None:
    with pytest.raises(ValueError, match="names 'flaten', which is no fusion; there are compute_copies"):
        check_names(("flaten",))
    with pytest.raises(ValueError, match=r"Policy\.without names 'flaten'"):
        compile_sharded(torch.nn.Linear(2, 2), policy=Policy(without=("flaten",)))
    with pytest.raises(ValueError, match=r"Policy\.without is 'exchange'; expected a tuple of names"):
        Policy(without="exchange")  # type: ignore[arg-type]


def test_only_the_table_asks_whether_there_are_kernels() -> None:
    root = Path(fsdp_compiled.__file__).parent
    readers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"\b(plan|self)\.kernels\b", path.read_text())
    }
    assert readers == {"plan/plan.py", "lower/fusions/__init__.py"}
    assert exchange.__module__ == "fsdp_compiled.lower.fusions.reductions"


# What is printed is what runs.


class Ran(TorchDispatchMode):
    """The operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _sharded(**policy: Any) -> Sharded:
    model, optimizer = _model()
    return compile_sharded(model, optimizer, loss=squares, policy=Policy(**policy))


def printed(program: Program) -> Iterator[str]:
    """The operators that the program's text names, in order."""
    for line in program.text().splitlines():
        if match := re.match(r"    \w+: .* = ([\w.]+)\(", line):
            yield match[1]


@pytest.mark.parametrize("without", [(), "all", ("flatten_gradients", "optimizer_update")], ids=str)
def test_an_eager_step_runs_the_operators_that_the_program_prints(without: Any) -> None:
    sharded = _sharded(lower="eager", kernels=True, clip=0.5, without=without)
    rows = torch.linspace(-1, 1, 24).view(4, 6)
    sharded.step(rows)
    with Ran() as ran:
        sharded.step(rows)
    wanted = [name for name in printed(sharded.program) if not name.startswith("getitem")]
    # What is made of others (`reshape`) shows as those; ours, as themselves and what their references call.
    mine = [name for name in wanted if name.startswith("fsdp_compiled.")]
    assert [name.removesuffix(".default") for name in ran.names if name.startswith("fsdp_compiled.")] == mine
    kernels = [name.partition(".")[2] for name in mine if name != "fsdp_compiled.addcdiv_"]  # which the rule has
    assert kernels == {(): ["flatten", "measure", "adam_"], "all": []}.get(without, ["measure"])
    shown = iter(name.removesuffix(".default") for name in ran.names)
    missing = [name for name in wanted if name != "aten.reshape" and name not in shown]  # in this order
    assert missing == []


def test_what_it_was_lowered_to_can_be_read(tmp_path: Path) -> None:
    rows = torch.linspace(-1, 1, 24).view(4, 6)
    eager, compiled = _sharded(lower="eager"), _sharded(kernels=True)
    for sharded in (eager, compiled):
        sharded.step(rows)
    assert re.match(r"eager: \d+ calls of PyTorch's", eager.lowered)
    assert re.match(r"inductor: \d+ pieces, of which \d+ are distinct, and \d+ calls that run", compiled.lowered)
    piece = r"piece [0-9a-f]{16} \((compiled by Inductor|from the cache on disk)\): \d+ operators"
    assert len(re.findall(piece, compiled.lowered)) == int(compiled.lowered.split()[1]) > 0
    assert "fsdp_compiled.adam_(" in compiled.lowered
    folder = compiled.dump(tmp_path)
    assert (folder / "lowered.txt").read_text() == compiled.lowered + "\n"
    stages = sorted(path.name for path in folder.glob("*.diff"))
    assert [name.partition("-")[2] for name in stages[-4:]] == [
        f"{name}.diff" for name in ("microbatch_sums", "gradient_statistics", "optimizer_update", "direct_gradients")
    ]
    assert "+    " in (folder / next(name for name in stages if "optimizer_update" in name)).read_text()
