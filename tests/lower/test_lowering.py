"""Lowering: ranks share the compiling, a second run finds it done, order is kept, and steps leave nothing behind."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from fsdp_compiled import Policy, Sharded, compile_sharded
from tests.chosen import chosen
from tests.launch import launch

WORKER = Path(__file__).parents[1] / "workers" / "lowering.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A compile cache for the ranks that is empty, but for headers: these take longer to compile than all kernels."""
    folder, headers = tmp_path_factory.mktemp("inductor"), Path(cache_dir(), "precompiled_headers")
    headers.mkdir(parents=True, exist_ok=True)
    (folder / headers.name).symlink_to(headers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def cold(cache: Path) -> dict[str, Any]:
    return launch(WORKER, 2, "compiled", "eager", "failure", "order eager", "order inductor")


@pytest.fixture(scope="module")
def warm(cache: Path, cold: dict[str, Any]) -> dict[str, Any]:
    return launch(WORKER, 2, "compiled")


def test_each_piece_is_compiled_by_one_rank_and_found_by_the_other(cold: dict[str, Any]) -> None:
    first, second = cold["compiled"]
    assert first["compiled"] == second["found"] > 0
    assert second["compiled"] == first["found"] > 0
    assert abs(first["compiled"] - second["compiled"]) <= 2


def test_a_second_run_compiles_nothing(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    for before, now in zip(cold["compiled"], warm["compiled"], strict=True):
        assert before["misses"] and not now["misses"]  # as PyTorch itself counts
        assert "compiled" not in now and now["found"] == before["compiled"] + before["found"]
        assert now["losses"] == before["losses"]


def test_what_was_compiled_computes_what_eager_does(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    for compiled in (*cold["compiled"], *warm["compiled"]):
        assert compiled["losses"] == pytest.approx(cold["eager"][0]["losses"], rel=1e-5)
        assert compiled["losses"] != pytest.approx([loss * 1.001 for loss in cold["eager"][0]["losses"]], rel=1e-5)


def test_a_compiler_that_fails_on_one_rank_is_an_error_on_all(cold: dict[str, Any]) -> None:
    other, failed = cold["failure"]
    assert failed["said"] == "RuntimeError: the compiler was not in the mood"
    assert other["said"].startswith("RankError: rank 1 failed") and "not in the mood" in other["said"]
    assert math.isfinite(other["then"]) and other["then"] == failed["then"]


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_collectives_run_in_the_order_of_the_program(cold: dict[str, Any], lower: str) -> None:
    for answer in cold[f"order {lower}"]:
        assert answer["ran"] == answer["planned"] and len(answer["ran"]) > 5
        reduction = "all_to_all_single" if lower == "inductor" else "reduce_scatter_tensor"  # the fusion `exchange`
        assert sum(name == reduction for name, _ in answer["planned"]) > 2


# A thousand steps.


def _small(lower: str) -> tuple[Sharded, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    sharded = compile_sharded(
        model, optimizer, loss=lambda model, x: model(x).square().mean(), policy=Policy(lower=lower, clip=1.0)
    )
    return sharded, schedule


def _objects(steps: int, lower: str, keep: list[torch.Tensor] | None = None) -> tuple[int, Sharded]:
    """How many more Python objects there are after so many steps."""
    sharded, schedule = _small(lower)

    def run(count: int) -> None:
        for _ in range(count):
            loss = sharded.step(torch.randn(4, 8))
            schedule.step()
            if keep is not None:
                keep.append(loss)

    run(20)
    before = _alive()
    run(steps)
    return _alive() - before, sharded


def _alive() -> int:
    """Python's objects, once garbage is gone, some of which goes only after what referred to it."""
    for _ in range(5):
        gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("lower", chosen(["eager", "inductor"], ["eager"]))
def test_a_thousand_steps_leave_nothing_behind(lower: str) -> None:
    grown, sharded = _objects(1000, lower)
    assert grown < 50  # fewer, where another test's objects go meanwhile
    assert sharded.captures == len(sharded.programs) == 1
    assert sharded.state.step == 1020
    resident = _resident()
    for _ in range(1000):
        sharded.step(torch.randn(4, 8))
    assert _resident() - resident < 2**20


def test_a_step_that_leaves_its_loss_is_noticed() -> None:
    assert _objects(300, "eager", keep=[])[0] >= 250


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_weights_of_one_channel_last_in_memory_keep_their_strides() -> None:
    torch.manual_seed(0)
    first, by_channel = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 4, 2, groups=4)
    model = nn.Sequential(first, nn.ReLU(), by_channel).to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 4, 5)
    expected = model(x).square().mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).square().mean())
    assert torch.allclose(sharded.step(x), expected)
