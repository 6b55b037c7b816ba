"""What rank 0 shows while it measures: a bar on a terminal, a line a phase and round elsewhere."""

import sys
from typing import Any, Protocol


class Screen(Protocol):
    def say(self, text: str) -> None: ...

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, doing: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    """The other ranks'."""

    def say(self, text: str) -> None:
        pass

    def phase(self, name: str, total: int) -> None:
        pass

    def advance(self, doing: str) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    def __init__(self) -> None:
        self._name, self._total, self._done = "", 0, 0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def phase(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0

    def advance(self, doing: str) -> None:
        self._done += 1
        self.say(f"{self._name} {self._done}/{self._total}: {doing}")

    def close(self) -> None:
        pass


class Live:
    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar: Any = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[doing]}"),
            expand=True,
        )
        self._task: Any = None
        self._begun = 0
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str, total: int) -> None:
        self._finish()
        self._task, self._begun = self._bar.add_task(name, total=total, doing=""), 0

    def advance(self, doing: str) -> None:
        """Called before what it names, so the bar shows one less."""
        self._bar.update(self._task, completed=self._begun, doing=doing)
        self._begun += 1

    def close(self) -> None:
        self._finish()
        self._bar.stop()

    def _finish(self) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=self._begun, doing="")


def screen(first: bool) -> Screen:
    if not first:
        return Silent()
    if not sys.stdout.isatty():
        return Plain()
    try:
        return Live()
    except ImportError:
        print("progress as plain lines: rich is not installed (pip install 'fsdp-compiled[bench]')", flush=True)
        return Plain()
