"""How fast a training job goes."""

import time


class Pace:
    """Time spent in steps: the first of this attempt, which compiles, by itself, and the others with validation and
    saving left out."""

    def __init__(self, tokens: int) -> None:
        self.first = 0.0  # seconds
        self.steps = 0
        self._tokens = tokens  # of all ranks, in one step
        self._seconds, self._started = 0.0, 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self, steps: int) -> None:
        """These many were made since the last time."""
        seconds = time.perf_counter() - self._started
        if self.steps == 0:
            self.first = seconds
        else:
            self._seconds += seconds
        self.steps += steps

    @property
    def tokens_per_second(self) -> float:
        return (self.steps - 1) * self._tokens / self._seconds if self._seconds else 0.0
