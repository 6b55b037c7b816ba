"""The options of `bench`: their defaults, their types, and what they refuse."""
# ruff: noqa: RUF009 (`option` makes a field)

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bench.presets import PRESETS
from bench.rivals import RIVALS
from fsdp_compiled.cli.options import add_options, fraction, not_negative, option, positive, whole

MEASURES = ("steps", "first-step", "checkpoint", "muon")
SIZES = ("layers", "width", "heads", "context", "batch", "rounds", "steps")  # of a preset


@dataclass(frozen=True)
class BenchOptions:
    preset: str = option("thin", "model and batch (%(default)s)", choices=tuple(PRESETS))
    nproc: int | None = option(None, "processes to start (default: one a GPU, else 2)", whole, "N")
    out: Path | None = option(None, "where everything is written (runs/bench-<date>-<time>)", Path, "FOLDER")
    seed: int = option(0, "for weights and batches (%(default)s)", not_negative, "N")

    rivals: tuple[str, ...] | None = option(
        None, f"of {', '.join(RIVALS)} (all that compute the same to the last digits)", None, "NAME",
        nargs="+", choices=tuple(RIVALS),
    )  # fmt: skip
    lower: str | None = option(
        None, "which lowerings of this package (both, where there is a compiler)",
        choices=("eager", "inductor", "both"),
    )  # fmt: skip
    measure: tuple[str, ...] = option(
        ("steps",), "steps: time, memory and collectives; first-step: how long it takes until the first step is done, "
        "with a cold and with a warm cache, in fresh processes; checkpoint: how long a step waits for one, until it is "
        "saved and loaded, beside FSDP2 with DCP; muon: what its update of the blocks' matrices takes, beside "
        "unsharded Muon and FSDP2 (steps)", None, "WHAT", nargs="+", choices=MEASURES,
    )  # fmt: skip
    rounds: int | None = option(None, "in each, every rival takes its turn (by preset)", whole, "N")
    steps: int | None = option(None, "in a rival's turn (by preset)", whole, "N")

    layers: int | None = option(None, "blocks", whole, "N")
    width: int | None = option(None, "size of the residual stream", whole, "N")
    heads: int | None = option(None, "attention heads", whole, "N")
    context: int | None = option(None, "tokens in a row", whole, "N")
    batch: int | None = option(None, "rows a rank sees in a step", whole, "N")

    network_gbps: float | None = option(None, "bandwidth, in gigabits per second", positive, "X")
    latency_ms: float = option(0.0, "of each collective (%(default)s)", fraction, "X")
    hosts: int | None = option(
        None, "so many Linux network namespaces, with cards of that bandwidth and packets that take that long, in the "
        "place of a simulated network; needs root", whole, "N",
    )  # fmt: skip
    node: int | None = option(
        None, "ranks of a node, over which rivals with tensor parallelism cut the model", whole, "N"
    )
    inner_gbps: float | None = option(None, "bandwidth inside of a node, in gigabits per second", positive, "X")
    part: str | None = option(None, argparse.SUPPRESS)  # what the ranks that our launcher started do; see start.py


GROUPS = {  # by their first option
    "preset": ("the run", None),
    "rivals": ("what is measured", None),
    "layers": ("the model and its batch, where they differ from the preset's", None),
    "network_gbps": ("a slow network, simulated, or between hosts that are namespaces (CPU alone)", None),
}


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, BenchOptions, GROUPS)


def bench_options(chosen: argparse.Namespace) -> BenchOptions:
    values = {field.name: getattr(chosen, field.name) for field in fields(BenchOptions)}
    values["rivals"] = tuple(dict.fromkeys(values["rivals"])) if values["rivals"] else None
    values["measure"] = tuple(dict.fromkeys(values["measure"]))
    if values["latency_ms"] and values["network_gbps"] is None:
        raise ValueError("--latency-ms is part of a simulated network; give its bandwidth too: --network-gbps 10")
    if values["hosts"] is not None and (values["network_gbps"] is None or values["inner_gbps"] is not None):
        raise ValueError("--hosts: say how fast their network cards are, and nothing else: --hosts 2 --network-gbps 1")
    if values["inner_gbps"] is not None and (values["node"] is None or values["network_gbps"] is None):
        raise ValueError(
            "--inner-gbps is the wire inside of a node of a simulated network; say how many ranks a node has, and what "
            "is between nodes: --node 2 --network-gbps 1 --inner-gbps 20"
        )
    return BenchOptions(**values)


def run_bench(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    options = bench_options(chosen)
    from bench.start import start

    return start(options, arguments)
