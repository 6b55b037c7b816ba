"""From a result's raw numbers to the figures that are shown: medians, quartiles, and ratios by round. Pure.

A *result* is what `result.json` holds. The CPU time of a round is the mean over ranks of a rank's step; of a rival
that runs on one process, all its time over the number of ranks, which is what the same work costs undivided. The
wall time is the slowest rank's. A ratio is the median over rounds of the ratios within each round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Literal

Result = Mapping[str, Any]
Clock = Literal["cpu", "wall"]
BASELINE = "fsdp2"  # against whom ratios are given


@dataclass(frozen=True)
class Spread:
    low: float  # first quartile
    middle: float
    high: float  # third quartile

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return Spread(low, middle, high)


@dataclass(frozen=True)
class Row:
    """A rival's figures; times in seconds. What was not measured is None."""

    name: str
    title: str
    cpu: Spread | None
    wall: Spread | None
    cpu_ratio: float | None
    wall_ratio: float | None
    peak_bytes: int | None
    peak_ratio: float | None
    collectives: int | None
    operators: int | None
    wire: float | None  # on a simulated network: the transfers of a step
    exposed: float | None  # and how long the rank waited for them
    sent: float | None  # between hosts: bytes of a step, by a host's network card
    simulated: float | None  # a step, as `simulate` says it
    cold: float | None
    warm: float | None


def rounds(result: Result, name: str, clock: Clock) -> list[float]:
    """Seconds a step, by round."""
    turns = result["rivals"][name][clock]
    if clock == "wall":
        return [max(turn) for turn in turns]
    return [sum(turn) / len(turn) for turn in turns]


def ratio(result: Result, name: str, other: str, clock: Clock = "cpu") -> float:
    """How many times the other's time a rival takes."""
    return median(
        mine / theirs for mine, theirs in zip(rounds(result, name, clock), rounds(result, other, clock), strict=True)
    )


def rows(result: Result, baseline: str = BASELINE) -> list[Row]:
    rivals = result["rivals"]
    against = rivals.get(baseline, {})
    made = []
    for name, facts in rivals.items():
        timed = "cpu" in facts
        compared = timed and "cpu" in against
        first = facts.get("first_step", {})
        made.append(
            Row(
                name,
                facts["title"],
                Spread.of(rounds(result, name, "cpu")) if timed else None,
                Spread.of(rounds(result, name, "wall")) if timed else None,
                ratio(result, name, baseline, "cpu") if compared else None,
                ratio(result, name, baseline, "wall") if compared else None,
                facts.get("peak_bytes"),
                facts["peak_bytes"] / against["peak_bytes"] if compared else None,
                facts.get("collectives"),
                facts.get("operators"),
                _middle([sent for sent, _ in facts.get("wire", ())]),
                _middle([waited for _, waited in facts.get("wire", ())]),
                _middle(facts.get("sent", ())),
                facts.get("simulated", {}).get("seconds"),
                first.get("cold"),
                first.get("warm"),
            )
        )
    return made


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None
