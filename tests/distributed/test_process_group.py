"""The process group on GPUs, by stand-ins: each rank's own device, NCCL's registration, its end, and lost devices."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group as imported_by_name

from fsdp_compiled import Policy, compile_sharded
from fsdp_compiled.cli.launch import _gpu
from fsdp_compiled.distributed import device_mesh, process_group
from fsdp_compiled.distributed.call_log import Calls, _finish
from fsdp_compiled.distributed.call_store import Board
from fsdp_compiled.distributed.device_mesh import connect
from fsdp_compiled.distributed.mesh import Mesh, RankError
from fsdp_compiled.distributed.process_group import before_end
from fsdp_compiled.lower.inductor import cache_place, divide
from fsdp_compiled.runtime.programs.failed_calls import FailedCalls
from tests.launch import launch
from tests.parts import parts

ASSERT = RuntimeError("CUDA error: device-side assert triggered")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Four GPUs; what is done to them and to the process group."""
    done: dict[str, Any] = {"current": 0, "group": None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: done.get("count", 4))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: done["current"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.update(current=device.index))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: done.update(group=(backend, options, dict(os.environ)))
    )
    for name in (*process_group.NCCL, "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_mesh.atexit, "register", lambda *_: None)
    yield done
    for name in process_group.NCCL:
        os.environ.pop(name, None)


def torchrun(patch: pytest.MonkeyPatch, local: int) -> None:
    for name, value in {"RANK": local, "WORLD_SIZE": 4, "LOCAL_RANK": local}.items():
        patch.setenv(name, str(value))


def test_our_process_group_is_bound_to_the_ranks_gpu_and_registers_no_graphs(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun(monkeypatch, 2)
    assert connect(None).device == torch.device("cuda", 2) and gpus["current"] == 2
    backend, options, environment = gpus["group"]
    assert backend == "nccl" and options == {"device_id": torch.device("cuda", 2)}
    assert environment["NCCL_GRAPH_REGISTER"] == "0" and environment["TORCH_NCCL_HIGH_PRIORITY"] == "1"


def test_who_sets_nccls_environment_decides(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 0)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    connect(None)
    environment = gpus["group"][2]
    assert environment["NCCL_GRAPH_REGISTER"] == "1" and environment["TORCH_NCCL_HIGH_PRIORITY"] == "0"


def test_the_only_gpu_that_a_process_sees_is_its_own(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 3)
    gpus["count"] = 1
    assert connect(None).device == torch.device("cuda", 0)


@pytest.mark.parametrize(("current", "bound", "expected"), [(0, None, 2), (3, None, 3), (0, 1, 1)])
def test_with_a_users_group_the_ranks_gpu_becomes_the_current_one(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    current: int, bound: int | None, expected: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOCAL_RANK", "2")
    gpus["current"] = current

    class Group:
        bound_device_id = torch.device("cuda", bound) if bound is not None else None
        group_name = "0"
        made = False
        options = SimpleNamespace(is_high_priority_stream=True)

        def _get_backend(self, _: torch.device) -> Any:
            return self

        def _is_initialized(self) -> bool:
            return self.made

    for name, value in {
        "is_initialized": lambda: True, "get_world_size": lambda: 4, "get_rank": lambda: 2,
        "get_backend_config": lambda: "cpu:gloo,cuda:nccl",
    }.items():  # fmt: skip
        monkeypatch.setattr(dist, name, value)
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", Group())
    monkeypatch.setattr(Group, "made", True)
    assert connect(None).device == torch.device("cuda", expected) and gpus["current"] == expected
    assert not {*process_group.NCCL} & {*os.environ}, "NCCL has read them by now: to set them would say what is not so"
    assert "priority" not in caplog.text
    process_group._say_normal_priority.cache_clear()
    Group.options.is_high_priority_stream = False
    for _ in range(2):
        connect(None)
    assert caplog.text.count("NCCL's stream has normal priority") == 1
    monkeypatch.setattr(Group, "made", False)
    connect(None)
    assert {name: os.environ[name] for name in process_group.NCCL} == process_group.NCCL


def test_graphs_go_before_the_process_group_whatever_name_ends_it() -> None:
    before = inspect.signature(imported_by_name), imported_by_name.__doc__, imported_by_name.__name__
    calls: list[bool] = []
    before_end(call := lambda: calls.append(dist.is_initialized()))  # type: ignore[func-returns-value]
    try:
        for end in (imported_by_name, dist.destroy_process_group, dist.distributed_c10d.destroy_process_group):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            end()
            assert not dist.is_initialized()
        assert calls == [True] * 3
        with pytest.raises(AssertionError, match="cannot be None"):  # PyTorch's own, as it was
            imported_by_name()
    finally:
        process_group._endings.remove(call)
    names = list(inspect.signature(imported_by_name).parameters)
    assert names == list(before[0].parameters) and before[1:] == (imported_by_name.__doc__, imported_by_name.__name__)
    assert imported_by_name is dist.destroy_process_group


def ranks(world: int) -> list[Calls]:
    store = dist.HashStore()
    found = []
    for rank in range(world):
        calls = Calls(Mesh(torch.device("cpu")))
        calls.mesh, calls.board = Mesh(torch.device("cuda", 0), shard=world, rank=rank), Board(store, rank, world)
        calls.board.interval = 0.0
        found.append(calls)
    return found


def make(calls: list[Calls], *rates: str, label: str = "step (a)") -> None:
    for one, digest in zip(calls, rates, strict=True):
        one.hypers = digest
        one.post(label, "wire")


def test_a_device_that_is_lost_over_rates_is_an_error_by_name_on_every_rank() -> None:
    both = ranks(2)
    for digests in (("aa", "aa"), ("bb", "bc"), ("dd", "dd")):  # the GPU breaks off a call or two later
        make(both, *digests)
    for calls in both:
        failed = FailedCalls(calls.mesh, calls, None, {})  # type: ignore[arg-type]
        error = failed.handle(None, None, ASSERT, True, "")  # type: ignore[arg-type]
        assert isinstance(error, RankError)
        assert "in call 2:\n  rank 0: step (a), rates bb\n  rank 1: step (a), rates bc" in str(error)
        assert "lost to this process" in str(error)
        with pytest.raises(RankError, match="in call 2"):
            calls.check_open()


def test_a_lost_device_is_an_error_by_name_where_it_comes_out_in_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = ranks(2)
    with parts(calls=both[0]) as of:
        sharded = compile_sharded(model, optimizer, loss=lambda model, x: model(x).sum(), policy=Policy(lower="eager"))
    make(both, "aa", "ab")

    def fill(*_: object) -> bool:
        raise ASSERT

    monkeypatch.setattr(of(sharded).hyperparameters, "unchanged", fill)
    with pytest.raises(RankError, match=r"in call 1:\n  rank 0: step \(a\), rates aa"):
        sharded.step(torch.ones(1, 2))


def test_another_assertion_of_a_device_is_not_blamed_on_the_ranks() -> None:
    both = ranks(2)
    make(both, "aa", "aa")
    assert both[0].parting(ASSERT) is None
    both[0].post("step (a)", "wire")  # the other is late
    assert both[0].parting(ASSERT) is None
    make(ranks(2), "aa", "ab")
    assert both[0].parting(RuntimeError("out of memory")) is None


def test_an_error_that_is_met_elsewhere_is_explained_when_python_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = ranks(2)
    make(both, "aa", "ab")
    assert both[1].board is not None
    monkeypatch.setattr(sys, "last_value", ASSERT, raising=False)
    _finish(both[1].board, both[1]._made)
    assert "rank 0: step (a), rates aa" in caplog.text


def test_code_is_shared_by_ranks_that_number_their_gpus_alike() -> None:
    places = [cache_place(torch.device("cuda", index)) for index in (0, 1, 0)]
    assert places[0] == places[2] != places[1]
    assert cache_place(torch.device("cpu")) == cache_place(torch.device("cpu"))
    assert divide({}, 1) == [{}]


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 4, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}),
        ("GPU-aa,GPU-bb", 2, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-bb"}),
        ("", 0, {"LOCAL_RANK": "1"}),
        (None, 0, {"LOCAL_RANK": "1"}),
    ],
)
def test_our_launcher_shows_each_rank_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, expected: dict[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert _gpu(1, 2, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_two_ranks_on_one_device_train_as_one_on_both_batches() -> None:
    """What tests/lower/test_cuda_graph_gpu.py runs on one GPU."""
    answer = launch(Path(__file__).parents[1] / "workers" / "one_gpu.py", 2, "cpu")
    assert answer["losses"] == pytest.approx(answer["expected"], rel=1e-5)
    assert answer["apart"] < 1e-4


def test_inductor_writes_the_gpus_number_into_what_it_makes() -> None:
    """Why the number stands in a piece's key; where this no longer holds, it may go."""
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    assert CUDADeviceOpOverrides().device_guard(3) == "torch.cuda._DeviceGuard(3)"
