"""What describes a program never stops it: a description that fails says so in its own place.

    peak: not predicted: IndexError: list index out of range, at scaled_dot_product_attention (memory.py, line 238)

Predictions, estimates and texts read every node of a program. A node of a kind that nobody thought of may be more than
they can read. The program runs all the same.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger("fsdp_compiled")


def attempt(make: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """The result of ``make``; if it raises, that of ``otherwise``, which gets the reason in one line."""
    try:
        return make()
    except Exception as error:
        log.debug("A description failed; the program is not touched by it.", exc_info=error)
        return otherwise(reason(error))


def reason(error: Exception) -> str:
    """``IndexError: list index out of range (memory.py, line 238)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {text[0]}' if text else ''}{place}"
