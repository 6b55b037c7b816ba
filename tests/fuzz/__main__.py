"""The fuzzer as a command."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

import tests.fuzz
from tests.fuzz import classes, stacks
from tests.fuzz.cases import make_case
from tests.fuzz.loops.launched import on_ranks
from tests.fuzz.trial import run, shrunk


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=(tests.fuzz.__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--count", type=int, default=100, help="how many programs (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--seed", type=int, help="this program alone")
    parser.add_argument("--stacks", action="store_true", help="stacks of equal blocks that hold objects, instead")
    parser.add_argument("--classes", action="store_true", help="weights of generated classes, instead")
    parser.add_argument("--loops", action="store_true", help="loops of fully_shard on two ranks, instead")
    given = parser.parse_args(arguments)
    seeds = [given.seed] if given.seed is not None else range(given.start, given.start + given.count)
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    if given.stacks or given.classes or given.loops:
        alone = stacks.run if given.stacks else classes.run
        for seed, kind, said in on_ranks(seeds) if given.loops else ((seed, *alone(seed)) for seed in seeds):
            counts[kind] += 1
            refusals[said.split(": [")[0][:140]] += kind == "refused"
            if kind in ("differs", "crashed"):
                print(f"seed {seed}: {kind}: {said}", flush=True)
        seeds = []
    for seed in seeds:
        outcome = run(make_case(seed))
        counts[outcome.kind or "right"] += 1
        if given.seed is not None:
            print(outcome.case)
        if outcome.kind == "refused":
            refusals[outcome.said[:100]] += 1
        elif outcome.kind:
            print(f"seed {seed}: {outcome.kind}: {outcome.said}", flush=True)
            least = shrunk(outcome)
            print(f"  at its smallest: {least.said}\n  {least.case}", flush=True)
            if least.trace:
                print(least.trace)
        elif seed % 50 == 49:
            print(f"{seed + 1 - seeds[0]} of {len(seeds)}: {dict(counts)}", flush=True)
    print(dict(counts))
    for said, count in (+refusals).most_common():
        print(f"{count:>5} refused: {said}")
    return 1 if counts["differs"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
