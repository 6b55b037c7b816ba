"""One training step on one GPU: this package's CUDA graph against PyTorch's own means, as JSON and a plot.

    python -m bench.gpu_step bench/results/gpu --preset thin

Losses first: every rival's first steps are compared with FSDP2's, and one that trains something else is reported as
wrong, without figures. Then each takes turns with this package's graph, a few steps each, in one process; a ratio is
the median over rounds of that within a round. At most two are alive at once, so that a large model fits.

For each: milliseconds a step; from the profiler, how much of the time from its first kernel to its last the GPU was
idle, and how often the host launched something; and the peak of allocated and of reserved memory, less what was there
before: of the steps after the first, which compiles and tries kernels in memory of its own, and with cuBLAS's workspace
of the current stream made beforehand. A graph is captured on another stream, which has its own: `own_workspace` says
how many bytes of the peak that is. What a rival cannot do is a line that says so. The file is written anew after each,
so that a run that is cut short keeps what it has.

--tiny: a model of a few thousand parameters, on a CPU if there is no GPU; what needs one is left out. For tests.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu_models import PRESETS, Setting
from bench.gpu_rivals import CASTS, OURS, REFERENCE, RIVALS, Step
from fsdp_compiled.cli.machine import hardware, versions

CHECKED = 6  # steps whose losses are compared; ours captures on the third
BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative, on those losses
PROFILED = 10  # steps
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset")
GRAPHS = (OURS, CASTS, "fsdp2-graph")  # captured on a stream of their own


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def first_losses(step: Step, setting: Setting) -> list[float]:
    return [step(tokens).item() for tokens in setting.batches(CHECKED)]


def distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference; infinite where a loss is no number."""
    if not all(map(math.isfinite, (*losses, *reference))):
        return math.inf
    if abs(reference[0] - reference[-2]) <= 1e-3 * abs(reference[0]):  # of the same batch
        raise ValueError(f"the reference's losses hardly move ({reference}), so that they are equal would say nothing")
    return max(abs(mine - other) / abs(other) for mine, other in zip(losses, reference, strict=True))


def turn(step: Step, setting: Setting, steps: int) -> float:
    """Milliseconds a step."""
    batches = setting.batches(steps)
    synchronize(setting.device)
    begun = time.perf_counter()
    for tokens in batches:
        step(tokens)
    synchronize(setting.device)
    return (time.perf_counter() - begun) / steps * 1e3


def busy(spans: Sequence[tuple[int, int]]) -> int:
    """How long any of these intervals lasted."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def profile(step: Step, setting: Setting, calls: int = PROFILED) -> dict[str, Any]:
    """From the profiler: the GPU's idle share, and what the host launched in a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if setting.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    batches = setting.batches(calls)
    step(batches[0])
    synchronize(setting.device)
    with torch.profiler.profile(activities=activities) as run:
        for tokens in batches:
            step(tokens)
        synchronize(setting.device)
    events = run.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_device = [event for event in events if event.device_type() == torch.profiler.DeviceType.CUDA]
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_device if event.duration_ns()]
    names: dict[str, float] = {}
    for event in events:
        if event.device_type() != torch.profiler.DeviceType.CUDA and event.name().startswith(LAUNCHES):
            names[event.name()] = names.get(event.name(), 0) + 1 / calls
    found: dict[str, Any] = {"launches": {name: round(count, 2) for name, count in sorted(names.items())}}
    if spans:
        whole = max(stop for _, stop in spans) - min(start for start, _ in spans)
        found["idle_share"] = 1 - busy(spans) / whole
    return found


def memory(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def workspace(device: torch.device) -> int:
    """Makes cuBLAS's workspace for the current stream, and says how large it is, by another stream's."""
    if device.type != "cuda":
        return 0
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.memory_allocated()
        torch.cuda.current_blas_handle()
        _workspace.append(torch.cuda.memory_allocated() - before)
    return max(_workspace)  # nothing is made where that stream had one


_workspace: list[int] = []


def begin(name: str, setting: Setting, losses: dict[str, list[float]]) -> tuple[Step, dict[str, Any]]:
    """Builds a rival, checks its losses, and says what that took."""
    own = workspace(setting.device)
    clean(setting.device)
    before, begun = memory(setting.device), time.perf_counter()
    step = RIVALS[name][1](setting)
    first, *others = setting.batches(CHECKED)
    losses[name] = [step(first).item()]
    clean(setting.device)
    losses[name] += [step(tokens).item() for tokens in others]
    found: dict[str, Any] = {"title": RIVALS[name][0], "losses": losses[name]}
    found["seconds_to_build"] = time.perf_counter() - begun
    if setting.device.type == "cuda":
        found["peak_allocated"] = torch.cuda.max_memory_allocated() - before[0]
        found["peak_reserved"] = torch.cuda.max_memory_reserved() - before[1]
        found["own_workspace"] = own if name in GRAPHS else 0
    if REFERENCE in losses:
        found["distance"] = distance(losses[name], losses[REFERENCE])
        if not found["distance"] <= BOUND[setting.preset.dtype]:
            raise ValueError(f"wrong losses: {losses[name]}, where {REFERENCE} has {losses[REFERENCE]}")
    return step, found


def contest(setting: Setting, names: Sequence[str], rounds: int, steps: int, keep: Callable[[Any], None]) -> Any:
    """Every rival's figures, by name; ``keep`` is given what there is after each."""
    results: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    step, _ = begin(REFERENCE, setting, losses)  # before there is anything to compare with
    del step
    mine: Step | None = None
    try:
        step, found = begin(OURS, setting, losses)
        found |= profile(step, setting)
        found["milliseconds"] = statistics.median(turn(step, setting, steps) for _ in range(rounds))
        mine, results[OURS] = step, found
    except Exception as error:  # the rivals' figures are worth having without ours
        results[OURS] = failure(OURS, error)
    keep(results)
    for name in names:
        if name == OURS or (name == CASTS and setting.preset.dtype == torch.float32):  # nothing is cast: the same
            continue
        if RIVALS[name][2] and setting.device.type != "cuda":
            results[name] = {"title": RIVALS[name][0], "error": "needs a GPU"}
            continue
        try:
            other, found = begin(name, setting, losses)
            found |= profile(other, setting)
            pairs = []
            for index in range(rounds):
                order = [(0, mine or other), (1, other)]
                times = {place: turn(run, setting, steps) for place, run in (order if index % 2 else order[::-1])}
                pairs.append((times[0], times[1]))
            found["milliseconds"] = statistics.median(theirs for _, theirs in pairs)
            if mine is not None:
                found["ours_beside"] = statistics.median(own for own, _ in pairs)
                found["times_ours"] = statistics.median(theirs / own for own, theirs in pairs)
            results[name] = found
            del other
        except Exception as error:  # one that fails is reported, and the others go on
            results[name] = failure(name, error)
        keep(results)
        print(line(name, results[name]), flush=True)
    return results


def failure(name: str, error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    return {"title": RIVALS[name][0], "error": f"{type(error).__name__}: {error}".splitlines()[0]}


def line(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"  {name:<16} {found['error']}"
    idle = f", idle {found['idle_share']:.1%}" if "idle_share" in found else ""
    ratio = f", {found['times_ours']:.2f} x ours" if "times_ours" in found else ""
    return f"  {name:<16} {found['milliseconds']:.3f} ms{ratio}{idle}, {sum(found['launches'].values()):.0f} launches"


def plot(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {name: found for name, found in record["results"].items() if "milliseconds" in found}
    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(shown) + 1.2), layout="constrained")
    axes.barh(
        [found["title"] for found in shown.values()],
        [found["milliseconds"] for found in shown.values()],
        color=["#2a6f97" if name.startswith("ours") else "#b0b0b0" for name in shown],
    )
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    axes.set_title(f"{record['preset']}: {record['hardware']}", fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for PRESET.json and PRESET.svg")
    parser.add_argument("--preset", choices=PRESETS, default="thin")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9, help="turns that each has (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a few thousand parameters, on any machine")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not given.tiny:
        print("bench.gpu_step needs a GPU: torch finds none. --tiny runs without.", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    setting = Setting(PRESETS[given.preset], device, given.tiny)
    given.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "command": f"python -m bench.gpu_step {given.out} --preset {given.preset}" + " --tiny" * given.tiny,
        "preset": given.preset,
        "batch": list(setting.batches(1)[0].shape),
        "dtype": str(setting.preset.dtype).removeprefix("torch."),
        "hardware": hardware(),
        "versions": versions("triton", "transformers"),
        "rounds": given.rounds,
        "steps": given.steps,
        "results": {},
    }

    def keep(results: Any) -> None:
        record["results"] = results
        (given.out / f"{given.preset}.json").write_text(json.dumps(record, indent=2) + "\n")

    with TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            results = contest(setting, given.rivals, given.rounds, given.steps, keep)
        finally:
            dist.destroy_process_group()
    keep(results)
    print(line(OURS, results[OURS]), flush=True)
    try:
        plot(record, given.out / f"{given.preset}.svg")
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
    failed = [name for name, found in results.items() if found.get("error", "needs a GPU") != "needs a GPU"]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
