"""`fsdp-compiled COMMAND`: the parser, and which file does what."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BEGUN = time.time()  # this command, before it imports PyTorch


def parser(command: str | None) -> argparse.ArgumentParser:
    """With the options of this command; those of others would import what only they need."""
    top = argparse.ArgumentParser(
        prog="fsdp-compiled",
        description="Fully sharded data parallelism as a compiler on top of torch.compile.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a byte-level GPT, sharded, on text of this machine",
        description="Trains a byte-level GPT, sharded over several processes, on text found on this machine "
        "or given with --data. Starts the processes by itself; under torchrun it joins those. The first "
        "Ctrl-C stops after the current step, saves what was reached and exits with 130; the second kills. "
        "The last line printed is the folder that holds everything the run wrote.",
    )
    if command == "train":
        from fsdp_compiled.cli.options import add_train_options

        add_train_options(train)

    bench = commands.add_parser(
        "bench",
        help="this package and its rivals, side by side in one run",
        description="Trains the same model on the same batches under plain PyTorch, DDP, FSDP2, these with "
        "torch.compile, and this package, in turns within one run, and reports processor time, wall time, peak memory "
        "and collectives of a step. Every rival's losses are compared with this package's eager lowering first; a "
        "wrong one ends the run. The last line printed is the folder with the result, the table and the plot.",
    )
    if command == "bench":
        from bench.options import add_bench_options

        add_bench_options(bench)

    compiling = commands.add_parser(
        "compile",
        help="what a script compiles, in one file, for other machines to start from",
        description="Runs a training script until everything it calls is compiled, and packs the cache into one file. "
        "FSDP_COMPILED_BUNDLE=FILE, or fsdp_compiled.load_bundle(FILE) in the script, starts from it on machines of "
        "the same kind, with as many ranks. Options come before SCRIPT. A bundle is code: load none that you would "
        "not run.",
    )
    if command == "compile":
        from fsdp_compiled.cli.compile import add_compile_options

        add_compile_options(compiling)

    show = commands.add_parser("show", help="print a run's plan, its final program, and where its time went")
    show.add_argument("run", type=Path, metavar="RUN", help="a run folder, or the folder a dump was written to")
    show.add_argument("--stage", metavar="NAME", help="another stage than the last, for example 'gather'")
    show.add_argument("--whole", action="store_true", help="every line, where repeated blocks are folded otherwise")
    show.add_argument("--html", action="store_true", help="print where the run's page is, report.html, to open offline")

    diff = commands.add_parser(
        "diff", help="what changed between two stages, or two runs: counts, bytes, peak, then lines"
    )
    diff.add_argument("a", type=Path, metavar="A", help="a stage's text file, a run folder, or a dump folder")
    diff.add_argument("b", type=Path, metavar="B", help="the same, to compare with A")
    diff.add_argument("--whole", action="store_true", help="of whole texts, where repeated blocks are folded otherwise")

    convert = commands.add_parser(
        "convert",
        help="a checkpoint into another layout: this package's, FSDP2's (DCP), Hugging Face's",
        description="Writes what checkpoint A holds to the new folder B, a tensor at a time, on one process. A may be "
        "a folder of step-N folders, of which the newest is taken, or one of them; what "
        "torch.distributed.checkpoint wrote; or a folder with model.safetensors. Nothing of it is unpickled but what "
        "a checkpoint needs.",
    )
    convert.add_argument("a", type=Path, metavar="A", help="the checkpoint")
    convert.add_argument("b", type=Path, metavar="B", help="where to write it; must not exist")
    convert.add_argument(
        "--to", choices=("ours", "dcp", "hf"), required=True,
        help="ours: for Sharded.load; dcp: for torch.distributed.checkpoint, as {'model': ..., 'optim': ...}; "
        "hf: weights alone, for from_pretrained",
    )  # fmt: skip

    check = commands.add_parser(
        "check",
        help="the self-test of this machine: kernels, graphs, collectives, lowering, a step against PyTorch and FSDP2",
        description="Tries what this package is made of on this machine, each part beside what it must equal: every "
        "kernel against its reference, both lowerings against plain PyTorch, CUDA graphs against steps without, "
        "collectives, and a step against FSDP2 on several ranks. Takes a minute or two. Exits with 1 where one fails.",
    )
    if command == "check":
        from fsdp_compiled.cli.check.options import add_check_options

        add_check_options(check)

    simulate = commands.add_parser(
        "simulate",
        help="plan, peak memory and timeline of a step on ranks that you do not have",
        description="Builds the step that compile_sharded would build on such a mesh, in this process, and prints "
        "what it is thought to take, to hold and to send. Nothing of it is run; no ranks, GPU or memory for the model "
        "are needed. Times tell which of two ways is faster, not milliseconds.",
    )
    if command == "simulate":
        from fsdp_compiled.cli.simulate import add_simulate_options

        add_simulate_options(simulate)

    plan = commands.add_parser(
        "plan",
        help="which machines and which policy, before they are rented",
        description="Prices the ways to train a model on GPUs that one does not have: placements, replicas, tensor "
        "parallelism, recomputation, microbatches, offload. Prints a table, the fastest that fits first, and its "
        "Policy to paste. Each is priced by the program that would run; nothing is fetched, and no GPU is needed.",
    )
    if command == "plan":
        from fsdp_compiled.cli.plan import add_plan_options

        add_plan_options(plan)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"] and not _benchmarks():
        cure = "run `make bench` in a clone"
        print(f"fsdp-compiled bench: error: benchmarks are no part of an installed package: {cure}.", file=sys.stderr)
        return 2
    chosen = parser(arguments[0] if arguments else None).parse_args(arguments)
    try:
        if chosen.command in ("show", "diff", "convert"):  # which need no model
            return _run(chosen, arguments)
        from fsdp_compiled.torch_private.names import supported

        with supported():
            return _run(chosen, arguments)
    except ValueError as error:
        print(f"fsdp-compiled {chosen.command}: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from fsdp_compiled.torch_private.names import UnsupportedTorch

        if not isinstance(error, UnsupportedTorch):
            raise
        print(f"fsdp-compiled {chosen.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        sys.stderr.close()  # or the interpreter complains of the same pipe while it exits
        return 0


def _benchmarks() -> bool:
    """Whether there are any: ``bench/`` of a clone, which can be imported from here on."""
    root = Path(__file__).parents[2]
    if not (root / "bench" / "start.py").is_file():
        return False
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return True


def _run(chosen: argparse.Namespace, arguments: list[str]) -> int:
    """What the command exits with. Each command's imports wait for it: a listing loads nothing that training needs."""
    if chosen.command == "train":
        from fsdp_compiled.cli.launch import start
        from fsdp_compiled.cli.options import train_options

        return start(train_options(chosen), arguments)
    if chosen.command == "bench":
        from bench import start as bench
        from bench.options import bench_options

        return bench.start(bench_options(chosen), arguments)
    if chosen.command == "check":
        from fsdp_compiled.cli.check import start as check
        from fsdp_compiled.cli.check.options import CheckOptions

        return check.start(CheckOptions(chosen.nproc, chosen.out), arguments)
    if chosen.command == "convert":
        from fsdp_compiled.cli import convert

        print(convert.convert(chosen.a, chosen.b, chosen.to))
        return 0
    if chosen.command == "compile":
        from fsdp_compiled.cli import compile as compiling

        return compiling.run(compiling.compile_options(chosen))
    if chosen.command == "simulate":
        from fsdp_compiled.cli import simulate

        print(simulate.run(simulate.simulate_options(chosen)))
        return 0
    if chosen.command == "plan":
        from fsdp_compiled.cli import plan

        print(plan.run(plan.plan_options(chosen)))
        return 0
    from fsdp_compiled.cli import show

    if chosen.command == "show":
        print(show.page(chosen.run) if chosen.html else show.show(chosen.run, chosen.stage, chosen.whole))
    else:
        print(show.diff(chosen.a, chosen.b, chosen.whole))
    return 0
