"""What `simulate` says of this package's rivals on this host's CPU, and on the network that they were measured on."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bench.options import BenchOptions
from bench.presets import Preset
from bench.rivals import RIVALS
from fsdp_compiled import Policy, simulate
from fsdp_compiled.plan.hardware import CPU, GBIT, Cluster
from fsdp_compiled.runtime.simulate import this_cpu

PURE, CUT = ("ours-eager", "ours"), ("ours-tp-eager", "ours-tp")


def machine(options: BenchOptions, tp: int = 1) -> Cluster:
    """Ranks on one host, or on the simulated network, where every rank has a wire of its own."""
    if options.network_gbps is None:
        return CPU
    return replace(
        CPU,
        network=options.network_gbps * GBIT * tp,
        inner=None if options.inner_gbps is None else options.inner_gbps * GBIT,
        node=tp,
        latency=CPU.wait(2) + options.latency_ms / 1e3,
    )


def add_estimates(result: dict[str, Any], options: BenchOptions, preset: Preset) -> None:
    """Adds to rivals that run with the usual policy: seconds of a step, and of waiting, and bytes at the peak."""
    conditions = result.get("conditions", {})
    if conditions.get("device") != "cpu" or options.hosts is not None or dist.is_initialized():
        return
    world, nodes = conditions["world"], options.node if options.inner_gbps is not None else None
    threads = torch.get_num_threads()
    torch.set_num_threads(conditions["threads a rank"])
    for name, facts in result["rivals"].items():
        cut = name in CUT
        if name not in (*PURE, *CUT) or (cut and nodes is None):
            continue
        tp = (nodes or 1) if cut else 1
        policy = Policy(lower="inductor" if RIVALS[name].compiles else "eager", tp=preset.tp if cut else None)
        rows = replace(preset, batch=preset.batch * tp).batches(1, 0, 1)[0]
        shape = {"shard": world // tp, "tp": tp} if cut else {"shard": world}
        with torch.random.fork_rng():
            said = simulate(preset.model, preset.loss, rows, shape, machine(options, tp), policy)
            said = said.on(this_cpu(said.plan))
        facts["simulated"] = {
            "seconds": said.seconds,
            "exposed": said.exposed,
            "peak_bytes": said.memory.peak.nbytes,
            "lanes": {lane: said.timeline.busy(lane) for lane in ("compute", "network", "tp")},
            "sent": dict(said.sent),
        }
    torch.set_num_threads(threads)
