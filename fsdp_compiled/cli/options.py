"""The options of `train`: their defaults, their types, and what they refuse."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import TypeVar


@dataclass(frozen=True)
class TrainOptions:
    nproc: int | None = None  # None: chosen by the launcher
    steps: int = 300
    out: Path | None = None
    seed: int = 0
    lower: str | None = None
    shard: str = "zero3"
    data: Path | None = None
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 16
    lr: float = 3e-3
    warmup: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    validate_every: int | None = None
    prompt: str | None = None
    global_batch: int | None = None  # None: --batch times the ranks
    checkpoint: Path | None = None
    save_every: int | None = None
    keep: int = 3
    on_nonfinite: str = "stop"
    max_restarts: int = 0
    profile: bool = False


T = TypeVar("T", int, float)


def number(kind: Callable[[str], T], name: str, expected: str, fits: Callable[[T], bool]) -> Callable[[str], T]:
    """What argparse reads an option's text with."""

    def read(text: str) -> T:
        value = kind(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    read.__name__ = name  # in argparse's own message
    return read


whole = number(int, "whole", "a whole number from 1", lambda value: value >= 1)
not_negative = number(int, "not_negative", "a whole number from 0", lambda value: value >= 0)
positive = number(float, "positive", "a number above 0", lambda value: 0 < value < inf)
fraction = number(float, "fraction", "a number from 0", lambda value: 0 <= value < inf)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    d = TrainOptions()
    run = parser.add_argument_group("the run")
    run.add_argument("--nproc", type=whole, metavar="N", help="processes to start (default: one a GPU, else 2)")
    run.add_argument("--steps", type=whole, default=d.steps, metavar="N", help="optimizer steps (%(default)s)")
    run.add_argument("--out", type=Path, metavar="FOLDER", help="run folder (runs/<date>-<time>)")
    run.add_argument(
        "--seed",
        type=not_negative,
        default=d.seed,
        metavar="N",
        help="for weights, windows and sample (%(default)s)",
    )
    run.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="a text file or a folder of them (default: the Python standard library's sources)",
    )
    run.add_argument("--validate-every", type=whole, metavar="N", help="steps between validations (a tenth of --steps)")
    run.add_argument("--prompt", metavar="TEXT", help="what the sample continues (default: the first held-out line)")
    run.add_argument(
        "--profile",
        action="store_true",
        help="measure three early steps, say what bounds them, and put them into the run's report.html and trace.json",
    )

    saving = parser.add_argument_group(
        "checkpoints and failures",
        "With --checkpoint the same command goes on where the last one ended, on any number of ranks. SIGTERM saves "
        "and ends with 143 (ranks under torchrun too), Ctrl-C with 130; a second one ends at once.",
    )
    saving.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save to, and go on from, this folder")
    saving.add_argument("--save-every", type=whole, metavar="N", help="steps between checkpoints (a tenth of --steps)")
    saving.add_argument("--keep", type=whole, default=d.keep, metavar="K", help="newest checkpoints kept (%(default)s)")
    saving.add_argument(
        "--max-restarts",
        type=not_negative,
        default=d.max_restarts,
        metavar="N",
        help="times that failed ranks are started again from the newest checkpoint (%(default)s; torchrun has its own)",
    )
    saving.add_argument(
        "--on-nonfinite",
        choices=("stop", "skip"),
        default=d.on_nonfinite,
        help="on a loss or gradient that is infinite or not a number: stop the run, or make that step without an "
        "update (%(default)s)",
    )

    sharding = parser.add_argument_group("how it is sharded and run")
    sharding.add_argument(
        "--shard",
        choices=("zero3", "zero2", "zero1", "ddp"),
        default=d.shard,
        help="what is sharded: parameters, gradients, optimizer state or nothing (%(default)s)",
    )
    sharding.add_argument(
        "--lower",
        choices=("eager", "inductor"),
        help="what runs the program (inductor where it can compile; short runs are told)",
    )

    model = parser.add_argument_group("the model and its batch")
    model.add_argument("--layers", type=whole, default=d.layers, metavar="N", help="blocks (%(default)s)")
    model.add_argument(
        "--width", type=whole, default=d.width, metavar="N", help="size of the residual stream (%(default)s)"
    )
    model.add_argument("--heads", type=whole, default=d.heads, metavar="N", help="attention heads (%(default)s)")
    model.add_argument("--context", type=whole, default=d.context, metavar="N", help="bytes in a window (%(default)s)")
    model.add_argument(
        "--batch",
        type=whole,
        default=d.batch,
        metavar="N",
        help="most windows a rank takes at once (%(default)s)",
    )
    model.add_argument(
        "--global-batch",
        type=whole,
        metavar="N",
        help="windows of all ranks in a step, on any number of ranks: fewer ranks take more microbatches of --batch "
        "(--batch times the ranks, or what the checkpoint's run had)",
    )

    rate = parser.add_argument_group("the optimizer (AdamW)")
    rate.add_argument("--lr", type=positive, default=d.lr, help="highest learning rate (%(default)s)")
    rate.add_argument(
        "--warmup",
        type=not_negative,
        metavar="N",
        help="steps until it is reached (a tenth of --steps, at most 50)",
    )
    rate.add_argument("--weight-decay", type=fraction, default=d.weight_decay, help="for matrices only (%(default)s)")
    rate.add_argument("--clip", type=fraction, default=d.clip, help="highest gradient norm; 0 for none (%(default)s)")


def train_options(chosen: argparse.Namespace) -> TrainOptions:
    options = TrainOptions(**{field.name: getattr(chosen, field.name) for field in fields(TrainOptions)})
    check_heads(options.width, options.heads)
    if options.profile and options.steps < 3:
        raise ValueError(f"--profile measures from the third step on, and --steps is {options.steps}; give at least 5")
    if options.checkpoint is None:
        for name in ("save_every", "max_restarts"):
            if getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} needs --checkpoint FOLDER: there is nothing to save to or to go on from")
    return options


def check_heads(width: int, heads: int) -> None:
    if width % heads or width // heads % 2:
        raise ValueError(
            f"--width {width} over --heads {heads}: each head needs the same, even size; "
            f"try --width {2 * heads * max(1, round(width / heads / 2))}"
        )


def run_train(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    options = train_options(chosen)
    from fsdp_compiled.cli.launch import start  # which imports PyTorch

    return start(options, arguments)
