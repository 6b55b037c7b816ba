"""A few steps of `bench.fewer_bytes` on two ranks: int8, and its control."""

from __future__ import annotations

from typing import Any

from bench import fewer_bytes
from tests.launch import answer

STEPS = 3


def main() -> dict[str, Any]:
    fewer_bytes.EVERY = 2
    found = {"int8": fewer_bytes.trained("int8", fewer_bytes.POLICIES["int8"], STEPS)}
    with fewer_bytes.nearest():
        name = fewer_bytes.CONTROL
        found[name] = fewer_bytes.trained(name, fewer_bytes.POLICIES[name], STEPS)
    return found


if __name__ == "__main__":
    answer(main)
