"""The options of `bench`: their defaults, their types, and what they refuse."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bench.presets import PRESETS
from bench.rivals import RIVALS
from fsdp_compiled.cli.options import fraction, not_negative, positive, whole

MEASURES = ("steps", "first-step", "checkpoint", "muon")
SIZES = ("layers", "width", "heads", "context", "batch", "rounds", "steps")  # of a preset


@dataclass(frozen=True)
class BenchOptions:
    preset: str = "thin"
    nproc: int | None = None  # None: chosen by the launcher
    rivals: tuple[str, ...] | None = None  # None: all
    lower: str | None = None
    measure: tuple[str, ...] = ("steps",)
    rounds: int | None = None  # None, here and below: as the preset has it
    steps: int | None = None
    out: Path | None = None
    seed: int = 0
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    context: int | None = None
    batch: int | None = None
    network_gbps: float | None = None
    latency_ms: float = 0.0
    node: int | None = None  # ranks of a node
    inner_gbps: float | None = None
    hosts: int | None = None  # real ones, in the place of the simulated network
    part: str | None = None  # what the ranks that our launcher started do; see start.py


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    d = BenchOptions()
    run = parser.add_argument_group("the run")
    run.add_argument("--preset", choices=tuple(PRESETS), default=d.preset, help="model and batch (%(default)s)")
    run.add_argument("--nproc", type=whole, metavar="N", help="processes to start (default: one a GPU, else 2)")
    run.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where everything is written (runs/bench-<date>-<time>)"
    )
    run.add_argument(
        "--seed", type=not_negative, default=d.seed, metavar="N", help="for weights and batches (%(default)s)"
    )

    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--rivals",
        nargs="+",
        choices=tuple(RIVALS),
        metavar="NAME",
        help=f"of {', '.join(RIVALS)} (all that compute the same to the last digits)",
    )
    what.add_argument(
        "--lower",
        choices=("eager", "inductor", "both"),
        help="which lowerings of this package (both, where there is a compiler)",
    )
    what.add_argument(
        "--measure",
        nargs="+",
        choices=MEASURES,
        default=list(d.measure),
        metavar="WHAT",
        help="steps: time, memory and collectives; first-step: how long it takes until the first step is done, with a "
        "cold and with a warm cache, in fresh processes; checkpoint: how long a step waits for one, until it is saved "
        "and loaded, beside FSDP2 with DCP; muon: what its update of the blocks' matrices takes, beside unsharded Muon "
        "and FSDP2 (%(default)s)",
    )
    what.add_argument("--rounds", type=whole, metavar="N", help="in each, every rival takes its turn (by preset)")
    what.add_argument("--steps", type=whole, metavar="N", help="in a rival's turn (by preset)")

    model = parser.add_argument_group("the model and its batch, where they differ from the preset's")
    model.add_argument("--layers", type=whole, metavar="N", help="blocks")
    model.add_argument("--width", type=whole, metavar="N", help="size of the residual stream")
    model.add_argument("--heads", type=whole, metavar="N", help="attention heads")
    model.add_argument("--context", type=whole, metavar="N", help="tokens in a row")
    model.add_argument("--batch", type=whole, metavar="N", help="rows a rank sees in a step")

    network = parser.add_argument_group("a slow network, simulated, or between hosts that are namespaces (CPU alone)")
    network.add_argument("--network-gbps", type=positive, metavar="X", help="bandwidth, in gigabits per second")
    network.add_argument(
        "--latency-ms", type=fraction, default=d.latency_ms, metavar="X", help="of each collective (%(default)s)"
    )
    network.add_argument(
        "--hosts",
        type=whole,
        metavar="N",
        help="so many Linux network namespaces, with cards of that bandwidth and packets that take that long, in the "
        "place of a simulated network; needs root",
    )
    network.add_argument(
        "--node",
        type=whole,
        metavar="N",
        help="ranks of a node, over which rivals with tensor parallelism cut the model",
    )
    network.add_argument(
        "--inner-gbps", type=positive, metavar="X", help="bandwidth inside of a node, in gigabits per second"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)


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
