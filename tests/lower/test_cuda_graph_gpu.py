"""Steps as CUDA graphs, on a GPU: the same numbers, one launch a step, no growth, and an end."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compiled import Policy, Sharded, compile_sharded
from fsdp_compiled.lower.cuda_graph import WARM
from fsdp_compiled.runtime.programs.program_cache import Programs
from tests.launch import launch
from tests.parts import parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUND = 1e-6  # relative, of losses in float32: the same kernels run, but some add in an order of their own


class Net(nn.Module):
    def __init__(self, width: int, layers: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 97)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return self.head(x)


def cross_entropy(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make(graph: Any, lower: str = "eager", width: int = 64, layers: int = 3, **options: Any) -> Sharded:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Net(width, layers, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = Policy(lower=lower, cuda_graph=graph, clip=1.0)
    return compile_sharded(model, optimizer, loss=cross_entropy, policy=policy)


def batches(count: int, rows: int = 4) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randint(97, (rows, 33), generator=generator).cuda()


def rate(sharded: Sharded, step: int) -> None:
    assert sharded.optimizer is not None
    sharded.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step // 5)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_200_launches_are_the_steps_themselves_and_nothing_grows(lower: str) -> None:
    graphed, plain = make(True, lower), make(False, lower)
    handed, held = [], []
    for step, tokens in enumerate(batches(200 + WARM)):
        losses, ends, drawn = [], [], torch.cuda.get_rng_state()
        for sharded in (graphed, plain):
            torch.cuda.set_rng_state(drawn)  # both draw from the one default generator
            rate(sharded, step)
            losses.append(sharded.step(tokens))
            ends.append(torch.cuda.get_rng_state())
        assert torch.equal(*ends)
        torch.testing.assert_close(*losses, rtol=BOUND, atol=0)
        torch.testing.assert_close(graphed.grad_norm, plain.grad_norm, rtol=10 * BOUND, atol=0)
        handed.append((losses[0], float(losses[0])))
        held.append(torch.cuda.memory_reserved())
    assert graphed.replays == 200
    assert all(float(loss) == value for loss, value in handed), "a loss that was handed out changed"
    assert held[-1] == held[20], "memory grew"
    weights, expected = graphed.full_state_dict(), plain.full_state_dict()
    assert max(float((weights[n] - expected[n]).abs().max()) for n in expected) < 1e-4
    still = make(True, lower, dropout=0.0)  # the control: the masks took part
    assert abs(float(still.step(next(batches(1)))) - handed[0][1]) > 100 * BOUND


def test_microbatches_and_shapes_share_state_and_pool() -> None:
    graphed, plain = make(True), make(False)
    for turn in range(6):
        for rows in (4, 2):
            *before, last = batches(1 + turn % 3, rows)
            for tokens in before:
                torch.testing.assert_close(*(each.accumulate(tokens) for each in (graphed, plain)), rtol=BOUND, atol=0)
            torch.testing.assert_close(*(each.step(last) for each in (graphed, plain)), rtol=BOUND, atol=0)
    assert graphed.replays > 6 and plain.replays == 0


def test_a_step_is_one_launch_of_a_graph_and_the_copies() -> None:
    sharded = make(True, "inductor")
    tokens = list(batches(WARM + 12))
    for each in tokens[: WARM + 2]:
        sharded.step(each)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as run:
        for each in tokens[WARM + 2 :]:
            sharded.step(each)
        torch.cuda.synchronize()
    names = Counter(event.name() for event in run.profiler.kineto_results.events())  # type: ignore[union-attr]
    assert names["cudaGraphLaunch"] == 10
    others = {
        name: count / 10 for name, count in names.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
    }
    copies = {name: count / 10 for name, count in names.items() if name.startswith(("cudaMemcpyAsync", "cudaMemset"))}
    # The batch's copy, the copy out, and the generator's seed and offset, which torch fills.
    assert sum(others.values()) + sum(copies.values()) <= 4, (others, copies)
    assert names["cudaStreamSynchronize"] == 0 and names["cudaMalloc"] == 0, names


def workspace() -> int:
    """Makes cuBLAS's workspace for the current stream, and says how many bytes that of another stream has."""
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    found = []
    for _ in range(2):  # the first may have had one
        with torch.cuda.stream(torch.cuda.Stream()):
            before = torch.cuda.memory_allocated()
            torch.cuda.current_blas_handle()
            found.append(torch.cuda.memory_allocated() - before)
    return max(found)


def test_memory_with_a_graph_is_that_without_but_for_the_workspace_of_its_stream() -> None:
    peaks, own = [], workspace()
    for graph in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        sharded = make(graph, width=512, layers=6)
        first, *others = batches(WARM + 6, rows=64)
        sharded.step(first)
        torch.cuda.reset_peak_memory_stats()  # what compiling and choosing among kernels took is over
        for tokens in others:
            sharded.step(tokens)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        sharded.close()
        del sharded
    assert peaks[1] - own <= 1.05 * peaks[0], (peaks, own)


def test_gradients_beside_a_graph_take_its_memory() -> None:
    own, reserved = workspace(), []
    for graph in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        sharded = make(graph, width=512, layers=6)
        for tokens in batches(WARM + 2, rows=64):
            sharded.step(tokens)
        expected = sharded.value_and_grad(tokens)[0].item()
        for _ in range(2):
            sharded.step(tokens)
        assert sharded.value_and_grad(tokens)[0].item() < expected
        reserved.append(torch.cuda.memory_reserved() - before)
        sharded.close()
        del sharded
    assert reserved[1] - own <= 1.2 * reserved[0], (reserved, own)


def broken(programs: Programs) -> None:
    """From here on the newest program reads a number on the host, which a capture forbids."""
    replay: Any = programs.newest.runner
    inner = replay.runner

    def reads(*given: Any) -> Any:
        results = inner(*given)
        results[0].item()
        return results

    replay.runner = reads


def test_after_a_capture_that_fails_dropout_steps_and_other_graphs_go_on() -> None:
    with parts() as of:
        failing, plain = make("auto"), make(False)
    tokens = list(batches(WARM + 6))
    for index, each in enumerate(tokens):
        drawn, losses = torch.cuda.get_rng_state(), []
        for sharded in (failing, plain):
            torch.cuda.set_rng_state(drawn)
            losses.append(sharded.step(each))
        torch.testing.assert_close(*losses, rtol=BOUND, atol=0)
        if index == 0:
            broken(of(failing).programs)
    assert failing.replays == 0
    nn.functional.dropout(torch.ones(100, device="cuda"))  # the generator is nobody's capture
    other = make(True)
    for each in tokens:
        other.step(each)
    assert other.replays == len(tokens) - WARM


def test_a_refused_program_and_close_give_memory_back() -> None:
    own = workspace()
    held = []
    for how in ("plain", "refused", "closed"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with parts() as of:
            sharded = make("auto" if how != "plain" else False, width=512, layers=6)
        for index, tokens in enumerate(batches(WARM + 4, rows=64)):
            sharded.step(tokens)
            if how == "refused" and index == 0:
                broken(of(sharded).programs)
        assert (sharded.replays > 0) == (how == "closed")
        sharded.close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved() - before)
        del sharded, of
    assert all(each <= held[0] + own + 2**22 for each in held), (held, own)


def test_two_ranks_on_one_gpu_train_as_one_on_both_batches() -> None:
    """Over gloo, since NCCL wants a GPU for each; what is between ranks is captured by `nccl.py`."""
    answer = launch(Path(__file__).parents[1] / "workers" / "one_gpu.py", 2, "cuda:0", timeout=100)
    assert answer["losses"] == pytest.approx(answer["expected"], rel=1e-5)
    assert answer["apart"] < 1e-4 and answer["replays"] == 0


def test_collectives_in_a_graph_on_one_rank_and_the_process_groups_end() -> None:
    answer = launch(Path(__file__).parents[1] / "workers" / "nccl.py", 1, timeout=100)
    assert answer["same"] or answer["worst"] < BOUND, answer
    assert answer["moved"] and answer["launches"] == 60 - WARM
    assert answer["broken"] and answer["launches after"] == answer["launches"]
    assert answer["again"]
