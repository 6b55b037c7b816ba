"""What rank 0 shows while it trains: a live display on a terminal, a line now and then elsewhere."""

import logging
import sys
import time
from typing import Any, Protocol

from fsdp_compiled.cli.journal import EXTRA, Record

EVERY = 5.0  # seconds between two plain lines
COMPILING = "compiling %d of %d pieces"  # how the package's log says how far a step is compiled


class Progress(Protocol):
    def say(self, text: str) -> None: ...

    def update(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Silent:
    """The other ranks'."""

    def say(self, text: str) -> None:
        pass

    def update(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    def __init__(self, steps: int, tokens: int) -> None:
        self._steps, self._tokens = steps, tokens
        self._shown = 0.0  # when the last line was printed

    def say(self, text: str) -> None:
        print(text, flush=True)

    def update(self, record: Record) -> None:
        now = time.monotonic()
        edge = record.step in (1, self._steps) or record.val_loss is not None
        if edge or now - self._shown >= EVERY:
            self._shown = now
            numbers = "  ".join(_numbers(record))
            self.say(f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {numbers}{self._left(record)}")

    def _left(self, record: Record) -> str:
        return f"  {_clock(eta)} left" if (eta := seconds_left(record, self._steps, self._tokens)) else ""

    def close(self) -> None:
        pass


class Live:
    """A bar, and under it the numbers, both redrawn in place; what is said scrolls by above them."""

    def __init__(self, steps: int, tokens: int) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.text import Text

        self._steps, self._tokens = steps, tokens
        self._val_loss: float | None = None
        self._console = Console(highlight=False)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=steps, left="")
        self._line = Text("", no_wrap=True, overflow="ellipsis")
        self._live: Any = Live(Group(self._bar, self._line), console=self._console, refresh_per_second=8)
        self._live.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def update(self, record: Record) -> None:
        self._val_loss = self._val_loss if record.val_loss is None else record.val_loss
        left = seconds_left(record, self._steps, self._tokens)
        self._bar.update(self._task, completed=record.step, left=f"{_clock(left)} left" if left else "")
        self._line.plain = "  ".join(_numbers(record, self._val_loss))

    def close(self) -> None:
        self._live.stop()


class Compiling(logging.Handler):
    """Inside, the progress of the compiler is said too, every second at most."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress
        self._said = 0.0  # when the last line was

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if str(record.msg).startswith(COMPILING) and now - self._said >= 1:
            self._said = now
            self._progress.say(record.getMessage())
        elif record.levelno >= logging.WARNING and self._alone and logging.lastResort is not None:
            logging.lastResort.handle(record)  # as without this handler

    def __enter__(self) -> None:
        log = logging.getLogger("fsdp_compiled")
        self._alone = not log.hasHandlers()
        self._level = log.level
        log.addHandler(self)
        if log.getEffectiveLevel() > logging.INFO:
            log.setLevel(logging.INFO)

    def __exit__(self, *error: object) -> None:
        log = logging.getLogger("fsdp_compiled")
        log.removeHandler(self)
        log.setLevel(self._level)


def progress(steps: int, tokens: int) -> Progress:
    """`tokens`: of all ranks, in one step."""
    if not sys.stdout.isatty():
        return Plain(steps, tokens)
    try:
        return Live(steps, tokens)
    except ImportError:
        print(f"progress as plain lines: rich is not installed ({EXTRA})", flush=True)
        return Plain(steps, tokens)


def seconds_left(record: Record, steps: int, tokens: int) -> float:
    """What the remaining steps take at the speed so far, validations left out; 0 when it is not known."""
    return (steps - record.step) * tokens / record.tokens_per_second if record.tokens_per_second else 0.0


def _numbers(record: Record, val_loss: float | None = None) -> list[str]:
    val_loss = record.val_loss if record.val_loss is not None else val_loss
    numbers = [f"loss {record.loss:.4f}"]
    numbers += [f"val {val_loss:.4f}"] if val_loss is not None else []
    numbers += [f"grad norm {record.grad_norm:.2f}", f"lr {record.lr:.1e}"]
    numbers += [f"{record.tokens_per_second:,.0f} tokens/s"] if record.tokens_per_second else []
    return [*numbers, f"{record.peak_memory / 2**30:.2f} GiB"]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
