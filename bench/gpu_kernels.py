"""How near the kernels come to the memory's bandwidth, against PyTorch's own, as JSON.

    python -m bench.gpu_kernels bench/results/kernels.json

Needs a GPU with Triton. Every candidate moves the same gradients or shards, those of GPT-2 124M's blocks and of a
wide layer. A figure is bytes that must be read and written, over the time by CUDA events, as a share of what a
device-to-device copy of the same number of bytes reaches in the same run; candidates take turns, and the medians are
reported. The copy is captured in a graph like the others, and each runs over several sets of tensors in turn, 200 MB
or more of them together, so that none finds its own in the GPU's cache. Nothing is reported of a candidate whose result
is wrong: each is compared with plain PyTorch first.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_compiled.kernels import reference
from fsdp_compiled.kernels.operators import operators

Run = Callable[[], object]
OUTSIDE = 200_000_000  # bytes; more than any GPU's cache holds
MOST = 16  # sets of tensors
WIDTH = 768
BLOCK = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)]
BLOCK += [(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]
UNITS: dict[str, list[tuple[int, ...]]] = {
    "a block of GPT-2": BLOCK,
    "four blocks of GPT-2": BLOCK * 4,
    "a wide block": [(4096,), (12288, 4096), (4096, 4096), (4096,), (11008, 4096), (11008, 4096), (4096, 11008)],
}
ADAM: dict[str, Any] = {
    "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "maximize": False,
}  # fmt: skip


@dataclass
class Contest:
    """Candidates for one piece of work of so many bytes."""

    work: str
    nbytes: int
    runs: dict[str, Run] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def enter(self, name: str, run: Run, check: Callable[[], None]) -> None:
        """Runs it once, with poisoned results, and lets it in if ``check`` says nothing."""
        try:
            run()
            torch.cuda.synchronize()
            check()
        except Exception as error:  # a candidate that this torch does not have is no reason to stop
            self.refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            if name.startswith("fsdp_compiled"):
                raise SystemExit(f"{self.work}: {name} is wrong: {error}") from error
        else:
            self.runs[name] = run


def milliseconds(run: Run, graph: bool, repeat: int) -> float:
    """The time of one run, over ``repeat`` in a row; ``graph``: replayed, without the host's part."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    run()
    start.record()
    for _ in range(repeat):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def rotated(make: Callable[[], Contest]) -> list[Contest]:
    """Contests of the same work on tensors of their own, so many that together they do not fit into the cache."""
    first = make()
    count = min(MOST, -(-OUTSIDE // max(first.nbytes, 1)))
    return [first, *(make() for _ in range(count - 1))]


def in_turn(runs: Sequence[Run]) -> Run:
    def run() -> None:
        for each in runs:
            each()

    return run


def measure(contests: Sequence[Contest], rounds: int, repeat: int) -> dict[str, Any]:
    """Each candidate's median time for one of the contests, and its share of a copy of as many bytes."""
    contest, count = contests[0], len(contests)
    pairs = [torch.ones(2, contest.nbytes // 2, dtype=torch.uint8, device="cuda").unbind() for _ in contests]
    runs = {"copy": in_turn([partial(target.copy_, source) for source, target in pairs])}
    runs |= {name: in_turn([each.runs[name] for each in contests]) for name in contest.runs}
    repeat = max(1, repeat // count)
    captured = {name: can_be_captured(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(milliseconds(run, captured[name], repeat) / count)
    copy = statistics.median(times["copy"])
    found: dict[str, Any] = {"work": contest.work, "bytes": contest.nbytes, "refused": contest.refused}
    found |= {"sets of tensors": count, "launched one by one": [name for name, graph in captured.items() if not graph]}
    found["candidates"] = {
        name: {
            "milliseconds": statistics.median(values),
            "gigabytes_per_second": contest.nbytes / statistics.median(values) / 1e6,
            "share_of_copy": statistics.median(copy / value for copy, value in zip(times["copy"], values)),
        }
        for name, values in times.items()
    }
    found["copy_milliseconds"] = copy
    return found


def can_be_captured(run: Run) -> bool:
    """Tables staged through the host cannot; those candidates are timed as they are launched."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run()
        return True
    except RuntimeError:
        torch.cuda.synchronize()
        return False


def same(mine: torch.Tensor, expected: torch.Tensor, rtol: float = 0.0) -> None:
    torch.testing.assert_close(mine, expected, rtol=rtol, atol=rtol * 0.1)


@torch.compile
def compiled_cat(pieces: Sequence[torch.Tensor], dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces]).to(dtype) * scale


def flatten(
    unit: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, reduced: torch.dtype, transposed: bool = False
) -> Contest:
    """A unit's gradients into one buffer, scaled."""
    gradients = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    if transposed:
        gradients = [gradient.t().contiguous().t() if gradient.dim() == 2 else gradient for gradient in gradients]
    offsets, numel = [], 0
    for gradient in gradients:
        offsets.append(numel)
        numel += -(-gradient.numel() // 64) * 64
    scale = torch.tensor(0.125, device="cuda")
    expected = reference.flatten(gradients, offsets, numel, reduced, scale)
    nbytes = sum(gradient.nbytes for gradient in gradients) + numel * reduced.itemsize
    label = f"{str(dtype)[6:]} to {str(reduced)[6:]}" + (", transposed" if transposed else "")
    contest = Contest(f"flatten and scale, {unit}, {label}", nbytes)
    result: dict[str, torch.Tensor] = {}
    pads = [
        torch.zeros(bound - offset - gradient.numel(), dtype=dtype, device="cuda")
        for gradient, offset, bound in zip(gradients, offsets, [*offsets[1:], numel], strict=True)
    ]
    pieces = [piece for pair in zip(gradients, pads, strict=True) for piece in pair]

    def ours() -> None:
        result["flat"] = operators.flatten(gradients, offsets, numel, reduced, scale)

    def cat() -> None:
        result["flat"] = torch.cat([piece.reshape(-1) for piece in pieces]).to(reduced).mul_(scale)

    def foreach() -> None:
        flat = torch.zeros(numel, dtype=reduced, device="cuda")
        views = [flat[o : o + g.numel()].view(g.shape) for g, o in zip(gradients, offsets, strict=True)]
        torch._foreach_copy_(views, gradients)
        result["flat"] = flat.mul_(scale)

    def chunk_cat() -> None:
        out = torch.empty(1, numel, dtype=reduced, device="cuda")
        torch._chunk_cat([piece.reshape(-1) for piece in pieces if piece.numel()], dim=0, num_chunks=1, out=out)
        result["flat"] = out.view(-1).mul_(scale)

    def inductor() -> None:
        result["flat"] = compiled_cat(pieces, reduced, scale)

    runs = {"fsdp_compiled": ours, "cat + mul": cat, "_foreach_copy_ + mul": foreach, "_chunk_cat + mul": chunk_cat}
    for name, run in {**runs, "torch.compile of cat": inductor}.items():
        result["flat"] = torch.full_like(expected, float("nan"))
        contest.enter(name, run, lambda: same(result["flat"], expected))
    return contest


def update(unit: str, shapes: Sequence[tuple[int, ...]], copies: bool, shards: int = 1) -> Contest:
    """AdamW on a rank's ``shards``, clipped, float32; ``copies``: with the next step's bfloat16 copy."""
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    numel -= numel % (8 * shards)
    start = [torch.randn(numel, device="cuda") for _ in range(3)] + [torch.rand(numel, device="cuda")]
    rate, factor = torch.tensor(1e-3, dtype=torch.float64, device="cuda"), torch.tensor(0.5, device="cuda")
    nbytes = numel * (4 * 4 + 3 * 4 + (2 if copies else 0))
    label = (f", {shards} shards" if shards > 1 else "") + (", with a bfloat16 copy" if copies else "")
    contest = Contest(f"AdamW and clipping, {unit}{label}", nbytes)
    expected = [tensor.clone() for tensor in start]
    p, g, m, s = ([tensor] for tensor in expected)
    reference.adam(p, g, m, s, [], [], rate, torch.tensor(5.0, device="cuda"), factor, **ADAM)

    def enter(name: str, prepare: Callable[[list[torch.Tensor]], tuple[Run, list[torch.Tensor]]]) -> None:
        run, results = prepare([tensor.clone() for tensor in start])

        def check() -> None:
            same(results[0], expected[0], 1e-6)
            if len(results) > 1:
                same(results[1], expected[0].bfloat16(), 2**-7)

        contest.enter(name, run, check)

    def ours(own: list[torch.Tensor]) -> tuple[Run, list[torch.Tensor]]:
        copy = [torch.full((numel,), float("nan"), dtype=torch.bfloat16, device="cuda")] if copies else []
        lists = [list(tensor.chunk(shards)) for tensor in own]
        parts = list(copy[0].chunk(shards)) if copies else []
        step = torch.tensor(5.0, device="cuda")
        return lambda: operators.adam_(*lists, [], parts, rate, step, factor, **ADAM), [own[0], *copy]

    def torch_fused(own: list[torch.Tensor]) -> tuple[Run, list[torch.Tensor]]:
        parameter = torch.nn.Parameter(own[0])
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True, capturable=True)
        state = {"step": torch.tensor(4.0, device="cuda"), "exp_avg": own[2], "exp_avg_sq": own[3]}
        optimizer.state[parameter] = state
        results = [parameter.data]
        if copies:
            results.append(torch.empty(numel, dtype=torch.bfloat16, device="cuda"))

        def run() -> None:
            parameter.grad = own[1] * factor
            optimizer.step()
            if copies:
                results[1].copy_(parameter.detach())

        return run, results

    def foreach(own: list[torch.Tensor]) -> tuple[Run, list[torch.Tensor]]:
        parameter = torch.nn.Parameter(own[0])
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, foreach=True, capturable=True)
        optimizer.state[parameter] = {
            "step": torch.tensor(4.0, device="cuda"),
            "exp_avg": own[2],
            "exp_avg_sq": own[3],
        }

        def run() -> None:
            parameter.grad = own[1] * factor
            optimizer.step()

        return run, [parameter.data]

    enter("fsdp_compiled", ours)
    enter("mul + fused AdamW" + (" + copy" if copies else ""), torch_fused)
    if not copies:
        enter("mul + foreach AdamW", foreach)
    return contest


def accumulate(unit: str, shapes: Sequence[tuple[int, ...]]) -> Contest:
    """A reduced bfloat16 gradient joins its float32 sum; the norm is of the sum as the update will scale it."""
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    total, part = torch.randn(numel, device="cuda"), torch.randn(numel, device="cuda").bfloat16()
    scale = torch.tensor(0.125, device="cuda")
    contest = Contest(f"accumulate, unscale, norm, {unit}", numel * (4 + 2 + 4))
    expected = total.clone()
    norm = reference.accumulate([expected], [part], scale).sum()
    own = {name: total.clone() for name in ("fsdp_compiled", "foreach")}
    result: dict[str, torch.Tensor] = {}

    def ours() -> None:
        result["norm"] = operators.accumulate_([own["fsdp_compiled"]], [part], scale).sum()

    def foreach() -> None:
        own["foreach"].add_(part)
        result["norm"] = (own["foreach"].norm() * scale) ** 2

    for name, run in {"fsdp_compiled": ours, "foreach": foreach}.items():

        def check(name: str = name) -> None:
            same(own[name], expected, 1e-6)
            same(result["norm"], norm, 1e-3)

        contest.enter(name, run, check)
    return contest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=7, help="turns that each candidate has (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=20, help="runs in a turn (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu_kernels needs a GPU: torch finds none.")
    import triton

    bf16, fp32 = torch.bfloat16, torch.float32
    contests: list[Callable[[], Contest]] = []
    for unit, shapes in UNITS.items():
        contests += [
            partial(flatten, unit, shapes, bf16, bf16),
            partial(flatten, unit, shapes, bf16, fp32),
            partial(flatten, unit, shapes, fp32, fp32),
            partial(flatten, unit, shapes, bf16, fp32, transposed=True),
            partial(update, unit, shapes, copies=False),
            partial(update, unit, shapes, copies=True),
            partial(accumulate, unit, shapes),
        ]
    contests.append(lambda: update("eight blocks of GPT-2", BLOCK * 8, copies=True, shards=32))
    results = []
    for make in contests:
        torch.manual_seed(0)
        results.append(measure(rotated(make), arguments.rounds, arguments.repeat))
        shares = {name: f"{each['share_of_copy']:.0%}" for name, each in results[-1]["candidates"].items()}
        print(f"{results[-1]['work']:<60} {shares}", flush=True)
        torch.cuda.empty_cache()
    record = {
        "command": "python -m bench.gpu_kernels " + str(arguments.out),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "rounds": arguments.rounds,
        "repeat": arguments.repeat,
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
