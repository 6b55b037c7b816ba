"""`fsdp-compiled COMMAND`: which module does what.

A command's module has ``add_COMMAND_options(parser)`` and ``run_COMMAND(chosen, arguments)``, which returns the exit
code; it is imported for that command alone.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

BEGUN = time.time()  # this command, before it imports PyTorch


class Command(NamedTuple):
    module: str
    help: str
    about: str | None = None


COMMANDS = {
    "train": Command(
        "fsdp_compiled.cli.options",
        "train a byte-level GPT, sharded, on text of this machine",
        "Trains a byte-level GPT, sharded over several processes, on text found on this machine "
        "or given with --data. Starts the processes by itself; under torchrun it joins those. The first "
        "Ctrl-C stops after the current step, saves what was reached and exits with 130; the second kills. "
        "The last line printed is the folder that holds everything the run wrote.",
    ),
    "bench": Command(
        "bench.options",
        "this package and its rivals, side by side in one run",
        "Trains the same model on the same batches under plain PyTorch, DDP, FSDP2, these with "
        "torch.compile, and this package, in turns within one run, and reports processor time, wall time, peak memory "
        "and collectives of a step. Every rival's losses are compared with this package's eager lowering first; a "
        "wrong one ends the run. The last line printed is the folder with the result, the table and the plot.",
    ),
    "compile": Command(
        "fsdp_compiled.cli.compile",
        "what a script compiles, in one file, for other machines to start from",
        "Runs a training script until everything it calls is compiled, and packs the cache into one file. "
        "FSDP_COMPILED_BUNDLE=FILE, or fsdp_compiled.load_bundle(FILE) in the script, starts from it on machines of "
        "the same kind, with as many ranks. Options come before SCRIPT. A bundle is code: load none that you would "
        "not run.",
    ),
    "show": Command("fsdp_compiled.cli.show", "print a run's plan, its final program, and where its time went"),
    "diff": Command(
        "fsdp_compiled.cli.show", "what changed between two stages, or two runs: counts, bytes, peak, then lines"
    ),
    "convert": Command(
        "fsdp_compiled.cli.show",
        "a checkpoint into another layout: this package's, FSDP2's (DCP), Hugging Face's",
        "Writes what checkpoint A holds to the new folder B, a tensor at a time, on one process. A may be "
        "a folder of step-N folders, of which the newest is taken, or one of them; what "
        "torch.distributed.checkpoint wrote; or a folder with model.safetensors. Nothing of it is unpickled but what "
        "a checkpoint needs.",
    ),
    "check": Command(
        "fsdp_compiled.cli.check",
        "the self-test of this machine: kernels, graphs, collectives, lowering, a step against PyTorch and FSDP2",
        "Tries what this package is made of on this machine, each part beside what it must equal: every "
        "kernel against its reference, both lowerings against plain PyTorch, CUDA graphs against steps without, "
        "collectives, and a step against FSDP2 on several ranks. Takes a minute or two. Exits with 1 where one fails.",
    ),
    "simulate": Command(
        "fsdp_compiled.cli.simulate",
        "plan, peak memory and timeline of a step on ranks that you do not have",
        "Builds the step that compile_sharded would build on such a mesh, in this process, and prints "
        "what it is thought to take, to hold and to send. Nothing of it is run; no ranks, GPU or memory for the model "
        "are needed. Times tell which of two ways is faster, not milliseconds.",
    ),
    "plan": Command(
        "fsdp_compiled.cli.plan",
        "which machines and which policy, before they are rented",
        "Prices the ways to train a model on GPUs that one does not have: placements, replicas, tensor "
        "parallelism, recomputation, microbatches, offload. Prints a table, the fastest that fits first, and its "
        "Policy to paste. Each is priced by the program that would run; nothing is fetched, and no GPU is needed.",
    ),
    "rendezvous": Command(
        "fsdp_compiled.cli.launch",
        "the store at which sites of local steps meet that come and go",
        'Serves the store that Policy(sync_every=..., rendezvous=Rendezvous("host:port")) names, until it is '
        "interrupted. It holds who is there and what was decided, and no weights. For another training start another.",
    ),
}


def parser(command: str | None) -> argparse.ArgumentParser:
    """The parser, with the options of this command alone."""
    top = argparse.ArgumentParser(
        prog="fsdp-compiled",
        description="Fully sharded data parallelism as a compiler on top of torch.compile.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help_, about) in COMMANDS.items():
        added = commands.add_parser(name, help=help_, description=about)
        if name == command:
            getattr(importlib.import_module(module), f"add_{name}_options")(added)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"] and not _benchmarks():
        cure = "run `make bench` in a clone"
        print(f"fsdp-compiled bench: error: benchmarks are no part of an installed package: {cure}.", file=sys.stderr)
        return 2
    chosen = parser(arguments[0] if arguments else None).parse_args(arguments)
    from fsdp_compiled.torch_private.names import UnsupportedTorch, supported

    needs_no_model = chosen.command in ("show", "diff", "convert")
    try:
        with nullcontext() if needs_no_model else supported():
            module = importlib.import_module(COMMANDS[chosen.command].module)
            return int(getattr(module, f"run_{chosen.command}")(chosen, arguments))
    except (ValueError, UnsupportedTorch) as error:
        print(f"fsdp-compiled {chosen.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        sys.stderr.close()  # or the interpreter complains of the same pipe while it exits
        return 0


def _benchmarks() -> bool:
    """Whether there are benchmarks: ``bench/`` of a clone, which can be imported from here on."""
    root = Path(__file__).parents[2]
    if not (root / "bench" / "start.py").is_file():
        return False
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return True
