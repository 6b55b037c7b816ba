"""While many objects are made that stay, Python's collector does not look through them.

    compile_sharded   takes a model over      tens of objects a parameter
    the first call    makes a program         a million

To look through them for garbage, again and again, takes a tenth of that time. They count as old at once, which else
takes a look at each; what is garbage among them waits for a collection of all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_grown = {"program": -1, "model": -1}  # of what was made, at how many collections of all it last grew old at once


@contextmanager
def no_collection(of: str = "program") -> Iterator[None]:
    """Inside, garbage is not looked for."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _grow_old(of)
            gc.enable()


def _grow_old(of: str) -> None:
    """Once between two collections of all, so that no more waits than what one program leaves, and one model."""
    collections = gc.get_stats()[-1]["collections"]
    if collections != _grown[of] and not gc.get_freeze_count():  # what the user froze stays so
        _grown[of] = collections
        gc.freeze()
        gc.unfreeze()
