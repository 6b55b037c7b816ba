"""The options of `train`: their defaults, their types, and what they refuse; and how options are declared."""
# ruff: noqa: RUF009 (`option` makes a field)

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", int, float)


def number(kind: Callable[[str], T], name: str, expected: str, fits: Callable[[T], bool]) -> Callable[[str], T]:
    """The function by which argparse reads an option's text."""

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


def file_to_write(text: str) -> Path:
    """A file in a folder that is there, which is asked before anything is worked out for it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"would be in {path.parent}, which is no folder"
        raise argparse.ArgumentTypeError(f"{text} {why}; expected a file to write")
    return path


def option(default: Any, about: str, kind: Any = None, metavar: str | None = None, **more: Any) -> Any:
    """A field, and what argparse is told of it; the field's name is the option's name."""
    told = {"default": default, "help": about, "type": kind, "metavar": metavar, **more}
    return field(default=default, metadata={name: value for name, value in told.items() if value is not None})


def add_options(parser: argparse.ArgumentParser, kind: Any, groups: Mapping[str, tuple[str, str | None]]) -> None:
    """Tells argparse of a dataclass's options. ``groups``: their titles and descriptions, by their first option."""
    group: Any = parser
    for one in fields(kind):
        if one.name in groups:
            group = parser.add_argument_group(*groups[one.name])
        group.add_argument(f"--{one.name.replace('_', '-')}", **one.metadata)


@dataclass(frozen=True)
class TrainOptions:
    nproc: int | None = option(None, "processes to start (default: one a GPU, else 2)", whole, "N")
    steps: int = option(300, "optimizer steps (%(default)s)", whole, "N")
    out: Path | None = option(None, "run folder (runs/<date>-<time>)", Path, "FOLDER")
    seed: int = option(0, "for weights, windows and sample (%(default)s)", not_negative, "N")
    data: Path | None = option(
        None, "a text file or a folder of them (default: the Python standard library's sources)", Path, "PATH"
    )
    validate_every: int | None = option(None, "steps between validations (a tenth of --steps)", whole, "N")
    prompt: str | None = option(None, "what the sample continues (default: the first held-out line)", None, "TEXT")
    profile: bool = option(
        False, "measure three early steps, say what bounds them, and put them into the run's report.html and "
        "trace.json", action="store_true",
    )  # fmt: skip

    checkpoint: Path | None = option(None, "save to, and go on from, this folder", Path, "FOLDER")
    save_every: int | None = option(None, "steps between checkpoints (a tenth of --steps)", whole, "N")
    keep: int = option(3, "newest checkpoints kept (%(default)s)", whole, "K")
    max_restarts: int = option(
        0, "times that failed ranks are started again from the newest checkpoint (%(default)s; torchrun has its own)",
        not_negative, "N",
    )  # fmt: skip
    on_nonfinite: str = option(
        "stop", "on a loss or gradient that is infinite or not a number: stop the run, or make that step without an "
        "update (%(default)s)", choices=("stop", "skip"),
    )  # fmt: skip

    shard: str = option(
        "zero3", "what is sharded: parameters, gradients, optimizer state or nothing (%(default)s)",
        choices=("zero3", "zero2", "zero1", "ddp"),
    )  # fmt: skip
    lower: str | None = option(
        None, "what runs the program (inductor where it can compile)",
        choices=("eager", "inductor"),
    )  # fmt: skip

    layers: int = option(4, "blocks (%(default)s)", whole, "N")
    width: int = option(128, "size of the residual stream (%(default)s)", whole, "N")
    heads: int = option(4, "attention heads (%(default)s)", whole, "N")
    context: int = option(128, "bytes in a window (%(default)s)", whole, "N")
    batch: int = option(16, "most windows a rank takes at once (%(default)s)", whole, "N")
    global_batch: int | None = option(
        None, "windows of all ranks in a step, on any number of ranks: fewer ranks take more microbatches of --batch "
        "(--batch times the ranks, or what the checkpoint's run had)", whole, "N",
    )  # fmt: skip

    lr: float = option(3e-3, "highest learning rate (%(default)s)", positive)
    warmup: int | None = option(None, "steps until it is reached (a tenth of --steps, at most 50)", not_negative, "N")
    weight_decay: float = option(0.1, "for matrices only (%(default)s)", fraction)
    clip: float = option(1.0, "highest gradient norm; 0 for none (%(default)s)", fraction)


GROUPS = {  # by their first option
    "nproc": ("the run", None),
    "checkpoint": (
        "checkpoints and failures",
        "With --checkpoint the same command goes on where the last one ended, on any number of ranks. SIGTERM saves "
        "and ends with 143 (ranks under torchrun too), Ctrl-C with 130; a second one ends at once.",
    ),
    "shard": ("how it is sharded and run", None),
    "layers": ("the model and its batch", None),
    "lr": ("the optimizer (AdamW)", None),
}


def add_train_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, TrainOptions, GROUPS)


def train_options(chosen: argparse.Namespace) -> TrainOptions:
    options = TrainOptions(**{field.name: getattr(chosen, field.name) for field in fields(TrainOptions)})
    check_heads(options.width, options.heads)
    if options.profile and options.steps < 3:
        raise ValueError(f"--profile measures from the third step on, and --steps is {options.steps}; give at least 5")
    if options.prompt == "":
        raise ValueError("--prompt is empty; give at least one byte, or leave it out")
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
