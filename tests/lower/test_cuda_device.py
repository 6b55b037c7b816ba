"""What is asked of CUDA for graphs, against its sources counted out: failed captures, memory, streams, obstacles."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compiled.ir.program import Port
from fsdp_compiled.lower import cuda_device
from fsdp_compiled.lower.cuda_device import STREAMS, CudaGraphs
from fsdp_compiled.lower.cuda_graph import WARM, Replays
from tests.torch_cuda import WORKSPACE, Cuda

GPU = torch.device("cuda", 0)
VERSIONS = ("2.11", "2.13", "2.14")


@pytest.fixture(params=VERSIONS)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch, request.param)


def everywhere(text: str) -> list[str]:
    return [text]


def replays(cuda: Cuda, wanted: Any = "auto") -> Replays:
    found = Replays(CudaGraphs(GPU), wanted)
    found.device.random_state = lambda: lambda: None  # type: ignore[method-assign, union-attr]
    return found


def wrap(shared: Replays, run: Any, cuda: Cuda) -> Any:
    """A program without inputs whose launches count as replays."""
    graph = torch.cuda.CUDAGraph
    graph.replay = lambda self: None  # type: ignore[method-assign]
    return shared.wrap(lambda: [run()], [Port("in", "shard", "w")][:0], "step", everywhere)


def test_a_program_is_warmed_up_and_captured_in_one_pool_on_one_stream(cuda: Cuda) -> None:
    device = CudaGraphs(GPU)
    assert device.warm(cuda.program()) == 1000
    [pool] = cuda.users
    stream = next(iter(cuda.workspaces))
    assert {segment.pool for segment in cuda.segments} == {pool}, "the workspace is in the pool too"
    assert cuda.log[-2:] == [f"{stream} waits for 0", f"0 waits for {stream}"]
    results, graph = device.capture(cuda.program())
    assert results == 1000 and cuda.users == {pool: 2} and cuda.reserved == 1000 + WORKSPACE
    graph.reset()
    assert cuda.users == {pool: 1} and not cuda.underway and not cuda.pinned and not cuda.taking


def test_after_an_error_in_a_warm_step_the_callers_stream_waits_for_what_was_begun(cuda: Cuda) -> None:
    device = CudaGraphs(GPU)
    with pytest.raises(ZeroDivisionError):
        device.warm(lambda: 1 // 0)
    assert cuda.log[-1].startswith("0 waits for") and not cuda.underway and not cuda.taking


def test_a_capture_that_breaks_off_leaves_a_process_that_draws_warms_up_and_captures(cuda: Cuda) -> None:
    device = CudaGraphs(GPU)
    device.warm(cuda.program())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="operation not permitted"):  # what broke it, not what ended it
            device.capture(cuda.program(reads=True))
        assert not cuda.underway
        cuda.draws()
        assert device.warm(cuda.program()) == 1000
        _, graph = device.capture(cuda.program())
        cuda.draws()
        graph.reset()
    assert not device.obstacle(collectives=True)
    device.release()
    assert cuda.reserved <= 4 * WORKSPACE * (cuda.version == "2.11"), "which keeps a workspace a stream"


def test_in_the_pool_of_the_broken_capture_the_old_torch_refuses_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the stand-in, as the sources, does to who goes on in that pool."""
    cuda = Cuda(monkeypatch, "2.11")
    device = CudaGraphs(GPU)
    device.warm(cuda.program())
    place = device._place
    assert place is not None
    with pytest.raises(RuntimeError):
        device.capture(cuda.program(reads=True))
    with (
        pytest.raises(RuntimeError, match="begin_allocate_to_pool: already recording"),
        cuda_device._capturing(torch.cuda.CUDAGraph(), place.pool, place.stream),
    ):
        pass
    device._place = place
    with pytest.raises(RuntimeError, match="beginAllocateToPool: already recording"):
        device.warm(cuda.program())


def test_a_failure_of_python_ends_a_capture_well(cuda: Cuda) -> None:
    device = CudaGraphs(GPU)
    device.warm(cuda.program())

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.capture(fails)
    assert device.warm(cuda.program()) == 1000
    device.release()
    assert cuda.reserved <= 2 * WORKSPACE * (cuda.version == "2.11")


def test_where_nothing_ends_the_generators_capture_no_other_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, "2.11")
    device = CudaGraphs(GPU)
    device.warm(cuda.program())
    begin = cuda_device._capturing

    def refuses(graph: Any, pool: Any, stream: Any) -> Any:
        if pool is None:
            raise RuntimeError("CUDA is lost")
        return begin(graph, pool, stream)

    monkeypatch.setattr(cuda_device, "_capturing", refuses)
    with pytest.raises(RuntimeError, match="operation not permitted"):
        device.capture(cuda.program(reads=True))
    assert "CUDA is lost" in device.obstacle(collectives=False)


def test_a_refused_program_gives_the_memory_of_its_pool_back(cuda: Cuda) -> None:
    shared = replays(cuda)
    step = wrap(shared, cuda.program(reads=True), cuda)
    for _ in range(WARM):
        step()
    assert cuda.reserved == 1000 + WORKSPACE
    for _ in range(3):
        step()
    old = WORKSPACE * (cuda.version == "2.11")
    # What the ungraphed calls cache, and nothing of the pool.
    assert cuda.reserved <= 1000 + old
    assert {segment.pool for segment in cuda.segments if not segment.active} == {(0, 0)}
    assert shared.launches == 0


def test_while_another_program_has_its_graph_the_pool_stays_and_goes_with_it(cuda: Cuda) -> None:
    shared = replays(cuda)
    fine, broken = wrap(shared, cuda.program(), cuda), wrap(shared, cuda.program(reads=True), cuda)
    for _ in range(WARM + 2):
        fine()
        broken()
    assert shared.launches == 2
    assert any(users for users in cuda.users.values())
    shared.close()
    assert all(segment.pool == (0, 0) for segment in cuda.segments if not segment.active)
    cuda.empty_cache()
    assert cuda.reserved <= 2 * WORKSPACE * (cuda.version == "2.11")
    for _ in range(WARM + 1):
        fine()
    assert shared.launches == 3


def test_the_trial_of_the_first_launch_takes_no_memory_of_its_own(cuda: Cuda) -> None:
    shared = replays(cuda)
    step = wrap(shared, cuda.program(), cuda)
    for _ in range(WARM + 2):
        step()
    assert shared.launches == 2 and cuda.reserved == 1000 + WORKSPACE


@pytest.mark.parametrize("beside", [True, False])
def test_what_runs_beside_a_graph_takes_no_memory_of_its_own(cuda: Cuda, beside: bool) -> None:
    shared = replays(cuda)
    step, program = wrap(shared, cuda.program(), cuda), cuda.program()
    forward = shared.beside(lambda: [program()]) if beside else lambda: [program()]
    for _ in range(WARM + 1):
        step()
    for _ in range(2):
        forward()
        step()
    assert cuda.reserved == (1000 if beside else 2000) + WORKSPACE


def test_without_giving_back_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(CudaGraphs, "release", lambda self: None)
    cuda = Cuda(monkeypatch, "2.13")
    shared = replays(cuda)
    step = wrap(shared, cuda.program(reads=True), cuda)
    for _ in range(WARM + 2):
        step()
    assert cuda.reserved == 2 * 1000 + WORKSPACE


def test_room_is_made_before_a_programs_first_call(cuda: Cuda) -> None:
    shared = replays(cuda)
    cached = cuda.allocate(5000)
    cached.active = False
    wrap(shared, cuda.program(), cuda)()
    assert cuda.log.index("empty") < cuda.log.index("capture") and cuda.reserved == 1000 + WORKSPACE


def test_no_two_share_a_stream_and_where_all_are_held_that_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    gc.collect()  # of the tests before
    devices = [CudaGraphs(GPU) for _ in range(STREAMS)]
    for device in devices:
        assert not device.obstacle(collectives=False)
        device.warm(cuda.program())
    assert len(cuda.workspaces) == STREAMS
    late = CudaGraphs(GPU)
    assert "hold a stream" in late.obstacle(collectives=False)
    devices.pop().release()
    assert not late.obstacle(collectives=False)
    late.warm(cuda.program())
    before = set(cuda.workspaces)
    devices.pop().release()
    assert len(before - set(cuda.workspaces)) == 1, "only its own workspace went"


@pytest.mark.parametrize(
    ("settings", "register", "refused"),
    [
        ("expandable_segments:True", None, True),
        ("max_split_size_mb:64, expandable_segments: True", "1", True),
        ("expandable_segments:True", "0", False),
        ("expandable_segments:False", None, False),
        ("", None, False),
    ],
)
def test_expandable_segments_and_nccl_are_refused_together(
    monkeypatch: pytest.MonkeyPatch, settings: str, register: str | None, refused: bool
) -> None:
    Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": False}])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if register is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    device = CudaGraphs(GPU)
    assert bool(device.obstacle(collectives=True)) is refused
    assert not device.obstacle(collectives=False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": True}])
    assert bool(device.obstacle(collectives=True)) is (register != "0")


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_another_allocator_is_an_obstacle_by_name(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    Cuda(monkeypatch, backend=backend)
    assert f"the {backend} allocator" in CudaGraphs(GPU).obstacle(collectives=False)


def test_the_surfaces_that_are_called_are_those_of_torch() -> None:
    """The stand-in takes the place of names; they are PyTorch's, in this version."""
    for name in ("graph_pool_handle", "current_blas_handle", "get_allocator_backend", "memory_snapshot"):
        assert callable(getattr(torch.cuda, name))
    called = Path(torch._inductor.__file__).with_name("cudagraph_trees.py").read_text()
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert f"torch._C.{name}(device, mem_pool)" in called
