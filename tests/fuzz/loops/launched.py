"""Loops, started on two ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.launch import launch

WORKER = Path(__file__).parent.parent.parent / "workers" / "loops.py"
CHUNK = 20  # seeds that one start of ranks runs


def on_ranks(seeds: Sequence[int], fault: str = "none") -> Iterator[tuple[int, str, str]]:
    """What became of each seed. One that ends the ranks, or their process group, is followed by others."""
    left = list(seeds)
    while left:
        try:
            found = launch(WORKER, 2, fault, *map(str, left[:CHUNK]))
        except RuntimeError as error:
            ended = int(re.findall(r"^seed (\d+)$", str(error), re.MULTILINE)[-1])  # the worker prints what it begins
            yield ended, "crashed", str(error)
            left.remove(ended)
            continue
        for seed, (kind, said) in found.items():
            yield int(seed), kind, said
            left.remove(int(seed))
