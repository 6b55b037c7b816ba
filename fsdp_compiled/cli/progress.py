"""What rank 0 says while it trains: a line now and then."""

import logging
import time

from fsdp_compiled.cli.journal import Record

EVERY = 5.0  # seconds between two lines of steps
COMPILING = "compiling %d of %d pieces"  # how the package's log says how far a step is compiled


class Progress:
    def __init__(self, steps: int, tokens: int, shown: bool = True) -> None:
        """``tokens``: of all ranks, in one step. ``shown``: not on the other ranks."""
        self._steps, self._tokens, self._shown = steps, tokens, shown
        self._said = 0.0  # when the last line of a step was

    def say(self, text: str) -> None:
        if self._shown:
            print(text, flush=True)

    def update(self, record: Record) -> None:
        now = time.monotonic()
        edge = record.step in (1, self._steps) or record.val_loss is not None
        if edge or now - self._said >= EVERY:
            self._said = now
            left = seconds_left(record, self._steps, self._tokens)
            numbers = [*_numbers(record), *[f"{_clock(left)} left"] * bool(left)]
            self.say(f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {'  '.join(numbers)}")


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


def seconds_left(record: Record, steps: int, tokens: int) -> float:
    """What the remaining steps take at the speed so far, validations left out; 0 when it is not known."""
    return (steps - record.step) * tokens / record.tokens_per_second if record.tokens_per_second else 0.0


def _numbers(record: Record) -> list[str]:
    numbers = [f"loss {record.loss:.4f}"]
    numbers += [f"val {record.val_loss:.4f}"] if record.val_loss is not None else []
    numbers += [f"grad norm {record.grad_norm:.2f}", f"lr {record.lr:.1e}"]
    numbers += [f"{record.tokens_per_second:,.0f} tokens/s"] if record.tokens_per_second else []
    return [*numbers, f"{record.peak_memory / 2**30:.2f} GiB"]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
