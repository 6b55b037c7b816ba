"""The options of `train`: their defaults, their types, and what they refuse."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path


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


def whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return value


def not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text}")
    return value


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text}")
    return value


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

    sharding = parser.add_argument_group("how it is sharded and run")
    sharding.add_argument(
        "--shard",
        choices=("zero3", "zero2", "zero1", "ddp"),
        default=d.shard,
        help="what is sharded: parameters, gradients, optimizer state or nothing (%(default)s)",
    )
    sharding.add_argument(
        "--lower", choices=("eager", "inductor"), help="what runs the program (inductor where it can compile)"
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
        help="windows a rank sees in a step (%(default)s)",
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
    if options.width % options.heads or options.width // options.heads % 2:
        raise ValueError(
            f"--width {options.width} over --heads {options.heads}: each head needs the same, even size; "
            f"try --width {2 * options.heads * max(1, round(options.width / options.heads / 2))}"
        )
    return options
