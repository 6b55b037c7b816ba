"""The launching process's part: chooses what was left open, starts the ranks for each part, and reports.

Parts run one after another, each in fresh processes: `steps`, all rivals side by side; and for the first step, each
rival alone, `cold` with an empty compile cache and `warm` with the cache that the cold run filled. Under torchrun
its processes are the ranks, and there is only `steps`.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench import checkpoint, hosts, muon, report
from bench.estimates import add_estimates
from bench.measure import measure_first_step, measure_steps
from bench.options import SIZES, BenchOptions
from bench.plot import plot
from bench.presets import PRESETS, Preset
from bench.rivals import BOUND, RIVALS, Rival
from bench.screen import screen
from fsdp_compiled.cli.launch import launch, refuse_used
from fsdp_compiled.cli.machine import choose_lower, hardware, versions
from fsdp_compiled.cli.rank import STOPPED, RankInfo, own_launcher, place, tell_failure, under_launcher
from fsdp_compiled.cli.simulate import sized
from fsdp_compiled.distributed.device_mesh import connect

RESULT = "result.json"
CACHES = ("cold", "warm")
TABLES = {"checkpoint": checkpoint.describe, "muon": muon.describe}  # of measures that are no rivals' steps


@dataclass(frozen=True)
class Part:
    """What one launch of the ranks measures."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def start(options: BenchOptions, arguments: Sequence[str]) -> int:
    if under_launcher():
        return _rank(options, arguments)
    options = resolve(options)
    if options.hosts is not None:
        return _on_hosts(options, arguments)
    preset, rivals = selection(options)
    assert options.out is not None and options.nproc is not None
    (options.out / "parts").mkdir(parents=True, exist_ok=True)
    for part in parts(options, rivals):
        logs = options.out / "logs" / part.name.replace("/", "-")
        logs.mkdir(parents=True, exist_ok=True)
        if part.name.endswith("cold"):
            shutil.rmtree(part.environment["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
            Path(part.environment["TMPDIR"]).mkdir(parents=True)
        command = [sys.executable, "-m", "fsdp_compiled", *arguments, *part.arguments]
        command += ["--out", str(options.out), "--part", part.name]
        environment = (
            dict(part.environment) if torch.cuda.is_available() else {**part.environment, "OMP_NUM_THREADS": "1"}
        )
        code = launch(command, options.nproc, logs, environment, "bench")
        if code:
            if code > 128:
                print("stopped: nothing is reported", file=sys.stderr)
            return code
    shutil.rmtree(options.out / "cache", ignore_errors=True)
    finish(options, preset, assemble(options, rivals), arguments)
    return 0


def _on_hosts(options: BenchOptions, arguments: Sequence[str]) -> int:
    """Its ranks in hosts of this machine, under torchrun."""
    assert options.hosts is not None and options.nproc is not None and options.network_gbps is not None
    command = ["-m", "fsdp_compiled", *arguments, "--out", str(options.out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "5"}
    with hosts.hosts(options.hosts, options.network_gbps, options.latency_ms / 1e3) as among:
        agents = hosts.torchrun(among, options.nproc // options.hosts, command, env=environment)
        return max(agent.wait() for agent in agents)


def resolve(options: BenchOptions) -> BenchOptions:
    """Checks what can be checked before anything is started, and chooses what was left open."""
    out = options.out or Path("runs", time.strftime("bench-%Y%m%d-%H%M%S"))
    if (out / RESULT).exists():
        raise ValueError(f"--out: {out} already holds a result; give another folder or remove that one")
    gpus = torch.cuda.device_count()
    if gpus and options.nproc is not None and options.nproc > gpus:
        raise ValueError(f"--nproc {options.nproc}: this machine has {gpus} GPUs, and each process needs its own")
    if gpus and options.network_gbps is not None:
        raise ValueError("--network-gbps simulates a network between CPUs; leave it out on GPUs")
    selection(options)
    nproc = options.nproc or gpus or 2
    if options.hosts is not None:
        if options.measure != ("steps",):
            raise ValueError("--hosts: only --measure steps is measured between hosts; leave the rest out")
        if (why := hosts.missing()) is not None and not under_launcher():
            raise ValueError(f"--hosts: no hosts can be made here ({why}); leave it out for a simulated network")
        if nproc % options.hosts:
            raise ValueError(f"--hosts {options.hosts}: {nproc} processes are no whole number a host; give --nproc")
    if options.node is not None and nproc % options.node:
        raise ValueError(f"--node {options.node}: {nproc} processes are no whole number of such nodes; give --nproc")
    refuse_used(out)  # last, since it makes the folder
    return replace(options, out=out, nproc=nproc)


def selection(options: BenchOptions) -> tuple[Preset, list[Rival]]:
    """What is trained, and by whom."""
    preset = sized(PRESETS[options.preset], **{name: getattr(options, name) for name in SIZES})
    names = options.rivals or tuple(name for name, rival in RIVALS.items() if rival.bound == BOUND)
    found, reason = choose_lower(cuda=torch.cuda.is_available())
    lower = options.lower or ("both" if found == "inductor" else "eager")
    rivals = []
    for name in names:
        rival = RIVALS[name]
        if rival.nodes and options.node is None:
            if options.rivals:
                raise ValueError(f"{name} treats the ranks of a node apart; say how many that are: --node 2")
            continue
        if rival.ours and not rival.compiles and lower == "inductor":
            continue
        if rival.ours and rival.compiles and lower == "eager":
            continue
        if rival.compiles and found == "eager":
            if options.rivals or options.lower in ("inductor", "both"):
                missing = (reason or "").removeprefix("--lower eager: ")
                raise ValueError(f"{name} cannot be measured here: {missing}; leave it out, or give --lower eager")
            continue
        rivals.append(rival)
    if not rivals:
        raise ValueError(f"--lower {lower} leaves none of --rivals {' '.join(names)}; give one that it allows")
    return preset, rivals


def parts(options: BenchOptions, rivals: Sequence[Rival]) -> list[Part]:
    assert options.out is not None
    made = []
    if "first-step" in options.measure:
        for rival in rivals:
            cache = options.out.absolute() / "cache" / rival.name
            for kind in CACHES if rival.compiles else CACHES[:1]:
                # Inductor's precompiled header is in the folder for temporary files, whatever the cache folder is.
                environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(cache / "tmp")}
                made.append(Part(f"first-step/{rival.name}/{kind}", ("--rivals", rival.name), environment))
    if "steps" in options.measure:
        made.append(Part("steps"))
    if "checkpoint" in options.measure:
        made.append(Part("checkpoint"))
    if "muon" in options.measure:
        made.append(Part("muon"))
    return made


def part_file(out: Path, name: str) -> Path:
    return out / "parts" / f"{name.replace('/', '-')}.json"


def _rank(options: BenchOptions, arguments: Sequence[str]) -> int:
    here = place()
    mine = own_launcher()
    try:
        if not mine:
            options = _under_torchrun(options, here)
        preset, rivals = selection(options)
        connect(None, here.device)
        assert options.out is not None
        name = options.part or "steps"
        if name == "steps":
            shown = screen(here.first)
            try:
                measured: Any = measure_steps(options, preset, rivals, here, shown)
            finally:
                shown.close()
            if measured is None:
                return STOPPED[signal.SIGINT]
        elif name == "checkpoint":
            rounds, folder = options.rounds or preset.rounds, options.out / "checkpoints"
            measured = checkpoint.measure_checkpoint(preset, here, options.seed, rounds, folder)
        elif name == "muon":
            network = options.network_gbps, options.latency_ms
            measured = muon.measure_muon(preset, here, options.seed, options.rounds or preset.rounds, *network)
        else:
            _, rival, cache = name.split("/")
            seconds, spent = measure_first_step(preset, RIVALS[rival], here, options.seed)
            measured = {"rival": rival, "cache": cache, "seconds": seconds, "cpu": spent}
            if here.first:
                print(f"first step of {rival}, {cache}: {seconds:.1f} s, {spent:.1f} s of processors", flush=True)
        if here.first:
            file = part_file(options.out, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(measured))
            if not mine:
                finish(options, preset, assemble(options, rivals), arguments)
        return 0
    except BaseException as error:
        tell_failure(here.rank, error)
        raise


def _under_torchrun(options: BenchOptions, here: RankInfo) -> BenchOptions:
    if options.measure != ("steps",):
        raise ValueError("--measure first-step starts processes of its own; run fsdp-compiled bench without torchrun")
    if not here.first:
        return replace(options, out=options.out or Path("runs"))
    if options.nproc is not None and options.hosts is None:
        print(f"--nproc is ignored: torchrun has started {here.world} processes", flush=True)
    return resolve(replace(options, nproc=None))


def assemble(options: BenchOptions, rivals: Sequence[Rival]) -> dict[str, Any]:
    """What the parts wrote, as one."""
    assert options.out is not None
    measured: dict[str, Any] = {"rivals": {rival.name: {"title": rival.title} for rival in rivals}}
    for file in sorted((options.out / "parts").glob("*.json")):
        facts = json.loads(file.read_text())
        if file.stem == "steps":
            by_rival = facts.pop("rivals")
            measured |= facts
            for name, more in by_rival.items():
                measured["rivals"][name] |= more
        elif file.stem in TABLES:
            measured[file.stem] = facts
        else:
            rival = measured["rivals"][facts["rival"]]
            rival.setdefault("first_step", {})[facts["cache"]] = facts["seconds"]
            rival.setdefault("first_step_cpu", {})[facts["cache"]] = facts["cpu"]
    return measured


def finish(options: BenchOptions, preset: Preset, measured: dict[str, Any], arguments: Sequence[str]) -> None:
    """Writes result.json, table.md and plot.png, and prints the table; the folder is the last line."""
    out = options.out
    assert out is not None
    result = {
        "command": " ".join(["fsdp-compiled", *arguments]),
        "hardware": hardware(),
        "versions": versions(*(["transformers"] if preset.llama else [])),
        "preset": asdict(preset),
        "seed": options.seed,
        **measured,
    }
    add_estimates(result, options, preset)
    (out / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(out / "parts")
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    rivals = any(len(facts) > 1 for facts in measured["rivals"].values())
    own = [describe(result[name]) for name, describe in TABLES.items() if name in result]
    text = f"{report.markdown(result)}\n" if rivals else ""
    text += "".join(f"{table}\n" for table in own)
    if "conditions" in result:
        text += f"\n{report.describe(result)}\n"
        plot([(str(preset), result)], out / "plot.png")
    (out / "table.md").write_text(text)
    print()
    if rivals:
        report.show(result)
    for table in own:
        print(table)
    print("\nwrote", ", ".join(sorted(path.name + "/" * path.is_dir() for path in out.iterdir())), "in")
    print(out, flush=True)
