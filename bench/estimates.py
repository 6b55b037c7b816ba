"""What `simulate` says of this package's rivals on the network that they were measured on."""

import os
from dataclasses import replace
from typing import Any

import torch

from bench.options import BenchOptions
from bench.presets import Preset
from bench.rivals import RIVALS
from fsdp_compiled import Policy, simulate
from fsdp_compiled.plan.hardware import CPU, GBIT, Cluster

PURE, CUT = ("ours-eager", "ours"), ("ours-tp-eager", "ours-tp")


def machine(options: BenchOptions, world: int, tp: int = 1) -> Cluster:
    """One rank's share of this machine, on the simulated network, where every rank has a wire of its own."""
    assert options.network_gbps is not None
    share = min(1.0, (os.cpu_count() or 1) / world)
    return replace(
        CPU,
        flops=CPU.rate(torch.float32) * share,
        memory=CPU.memory * share,
        network=options.network_gbps * GBIT * tp,
        inner=None if options.inner_gbps is None else options.inner_gbps * GBIT,
        node=tp,
        latency=CPU.wait(2) + options.latency_ms / 1e3,
    )


def add_estimates(result: dict[str, Any], options: BenchOptions, preset: Preset) -> None:
    """Adds to rivals that run with the usual policy, where nodes are simulated: seconds of a step, and of waiting."""
    if options.inner_gbps is None or options.node is None:
        return
    world = result["conditions"]["world"]
    for name, facts in result["rivals"].items():
        if name not in (*PURE, *CUT):
            continue
        cut = RIVALS[name].tp
        policy = Policy(lower="inductor" if RIVALS[name].compiles else "eager", tp=preset.tp if cut else None)
        rows = replace(preset, batch=preset.batch * (options.node if cut else 1)).batches(1, 0, 1)[0]
        shape = {"shard": world // options.node, "tp": options.node} if cut else {"shard": world}
        with torch.random.fork_rng():
            said = simulate(
                preset.model, preset.loss, rows, shape, machine(options, world, options.node if cut else 1), policy
            )
        facts["simulated"] = {
            "seconds": said.seconds,
            "exposed": said.exposed,
            "lanes": {lane: said.timeline.busy(lane) for lane in ("compute", "network", "tp")},
            "sent": dict(said.sent),
        }
