"""What `plan` found, as a table, as JSON and as a picture: ways to train, and what each of them costs.

                                   fits  peak GiB   step s       tok/s/GPU    MFU  exposed  bound by
zero3 shard 8, 1x8 rows, ...       yes       59.6     7.95 ±4%       8241  48.3%     0.8%  arithmetic
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled.plan.hardware import ERROR, GIB, JUDGED, PEAK_ERROR, Cluster
from fsdp_compiled.policy import Policy

NETWORKS = (10, 100, 400, 1600, 3200, 12800)  # Gb/s of a node's network, for the picture
LINES = ("-", "--", "-.", ":")  # styles in the picture
WAITS = 0.15  # above this fraction of a step, waiting bounds it


@dataclass(frozen=True)
class Way:
    """One way to train: the mesh, a rank's microbatch and how many make a step, and the policy."""

    replicate: int
    shard: int
    tp: int
    rows: int
    microbatches: int
    policy: Policy

    def __str__(self) -> str:
        policy = self.policy
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        rest = ", offload" if policy.offload else ", full sums" if policy.accumulate == "full" else ""
        rest += ", eager" if policy.lower == "eager" else ""
        rest += f", onto {policy.reshard_onto}" if policy.reshard_onto is not None else ""
        return f"{policy.shard} {mesh}, {self.rows}x{self.microbatches} rows, recompute {policy.recompute}{rest}"

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh's axes, outermost first, and their sizes."""
        sizes = {"replicate": self.replicate, "shard": self.shard, "tp": self.tp}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == "shard"}

    @property
    def group(self) -> str:
        """The placement and the mesh: ways of one group have one colour in the picture."""
        return f"{self.policy.shard}, " + ", ".join(f"{axis} {size}" for axis, size in self.mesh.items())


@dataclass(frozen=True)
class Price:
    """The cost of a way. ``seconds``: of a step. ``exposed``: the fraction in which a rank waits. ``flops``: of a
    rank's forward and backward, without recomputation. ``whole``: simulated at the model's whole depth. ``elsewhere``:
    seconds of a step on other clusters, where they were asked for."""

    way: Way
    peak: float
    seconds: float
    exposed: float
    products: float
    flops: float
    tokens: float
    whole: bool = False
    elsewhere: tuple[float, ...] = ()

    def rate(self, ranks: int) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.seconds / ranks

    @property
    def bound(self) -> str:
        """What limits the step most."""
        if self.exposed > WAITS:
            return "host memory" if self.way.policy.offload else "network"
        return "arithmetic" if self.products > 0.5 else "memory traffic"


@dataclass(frozen=True)
class Plans:
    """All ways, the fastest that fits first. ``error``: the median and the worst error for published runs
    (`plan.hardware.ERROR`). ``seconds``: of the search. ``resident``: for each of its processes, the most bytes that it
    had in memory. ``fewer``: if the network bounds the best way, policy settings that send fewer bytes at the
    price of rounding or delay, each with the fraction of the step's time that remains."""

    prices: tuple[Price, ...]
    cluster: Cluster
    ranks: int
    inputs: Mapping[str, Any]
    capacity: float
    tokens: float | None = None
    dollars: float | None = None  # of a GPU's hour
    networks: Mapping[str, Sequence[float]] | None = None  # tokens a second and GPU, by way, at `NETWORKS`
    error: tuple[float, float] = ERROR
    fewer: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    resident: tuple[int, ...] = ()

    @property
    def judged(self) -> bool:
        """Whether published runs on this GPU were compared with estimates."""
        return self.cluster.name in JUDGED

    @property
    def best(self) -> Price:
        return self.prices[0]

    def fits(self, one: Price) -> bool:
        return one.peak <= self.capacity

    def row(self, one: Price) -> dict[str, Any]:
        peak = self.cluster.peak or self.cluster.rate(torch.bfloat16)
        rate = one.rate(self.ranks)
        found: dict[str, Any] = {
            "way": str(one.way),
            "fits": self.fits(one),
            "peak GiB": one.peak / GIB,
            "peak GiB band": _within(one.peak / GIB, PEAK_ERROR),
            "step seconds": one.seconds,
            "step seconds band": _within(one.seconds, self.error[0]) if self.judged else None,
            "tokens/s/GPU": rate,
            "MFU": one.flops / one.seconds / peak,
            "exposed": one.exposed,
            "bound by": one.bound,
        }
        if self.tokens is not None:
            found["days"] = self.tokens / rate / self.ranks / 86400
            if self.dollars is not None:
                found["cost"] = found["days"] * 24 * self.ranks * self.dollars
        return found

    def json(self) -> str:
        policies = [{field: repr(value) for field, value in _set(one.way.policy).items()} for one in self.prices]
        rows = [{**self.row(one), "policy": policy, "mesh": one.way.mesh, "rows": one.way.rows,
                 "microbatches": one.way.microbatches} for one, policy in zip(self.prices, policies)]  # fmt: skip
        figures = {name: repr(value) for name, value in asdict(self.cluster).items()}
        found = {"inputs": dict(self.inputs), "cluster": figures, "error": self.error, "ways": rows}
        found["fewer bytes"] = dict(self.fewer)
        found["search"] = {"seconds": self.seconds, "resident bytes": self.resident}
        return json.dumps(found, indent=1)

    def lines(self, most: int = 12) -> Iterator[str]:
        yield f"{self.ranks} x {self.cluster.name}, nodes of {self.cluster.node}, {len(self.prices)} ways priced"
        yield from self._bands()
        rows = [self.row(one) for one in self.prices]
        band = f" ±{self.error[0]:.0%}" if self.judged else ""
        wide = max(len(row["way"]) for row in rows[:most])
        head = f"{'':{wide}}  fits {'peak GiB':>9} {'step s':>8}{'':{len(band)}} {'tok/s/GPU':>10} {'MFU':>6} "
        head += f"{'exposed':>8}  bound by"
        yield (
            head + (f"{'':8}{'days':>8}" if "days" in rows[0] else "") + (f" {'cost':>11}" if "cost" in rows[0] else "")
        )
        for row in rows[:most]:
            line = (
                f"{row['way']:{wide}}  {'yes' if row['fits'] else 'no':4} {row['peak GiB']:9.1f} "
                f"{row['step seconds']:8.3g}{band} {row['tokens/s/GPU']:10.0f} {row['MFU']:6.1%} "
                f"{row['exposed']:8.1%}  {row['bound by']:16}"
            )
            line += f"{row['days']:8.1f}" if "days" in row else ""
            yield (line + (f" {row['cost']:11,.0f}" if "cost" in row else "")).rstrip()
        if len(rows) > most:
            yield f"... and {len(rows) - most} more"
        yield ""
        if not self.fits(self.best):
            yield f"nothing fits {self.capacity / GIB:.0f} GiB; the least is the first"
        mesh = self.best.way.mesh
        device = "cuda" if self.cluster.gpu else "cpu"
        yield f"mesh = init_device_mesh('{device}', {tuple(mesh.values())}, mesh_dim_names={tuple(mesh)})"
        yield f"policy = {policy_text(self.best.way.policy)}"
        yield f"# {self.best.way.rows} rows a rank, {self.best.way.microbatches} microbatches a step"
        if self.fewer:
            parts = (f"{change}, {part:.2f} of its time" for change, part in self.fewer.items())
            yield f"# the network bounds it; fewer bytes, for rounding or delay: {'; '.join(parts)}"
        held = " + ".join(f"{size / GIB:.1f}" for size in self.resident)
        yield f"# searched in {self.seconds:.0f} s, with {held} GiB of memory at most"

    def _bands(self) -> Iterator[str]:
        """The errors of the table's estimates, and where they come from."""
        median, worst = self.error
        off = f"of published runs the median was off by {median:.0%}, the worst by {worst:.0%}"
        if self.judged:
            yield f"step: {off}; all of these were eager PyTorch, and none was compiled"
        else:
            yield f"step: not compared with {self.cluster.name}; on {', '.join(JUDGED)} {off}"
        yield f"peak: tests hold it to within {PEAK_ERROR:.0%} of an allocator on a CPU; not compared with a GPU"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def picture(self, path: Path) -> None:
        """Plots throughput over memory for all ways, and over networks for each group's best way. Needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
        groups = list(dict.fromkeys(one.way.group for one in self.prices))
        for index, group in enumerate(groups):
            own = [one for one in self.prices if one.way.group == group]
            peaks, speeds = [one.peak / GIB for one in own], [one.rate(self.ranks) for one in own]
            left.scatter(peaks, speeds, s=18, color=f"C{index}", label=group)
        left.axvline(self.capacity / GIB, color="black", linestyle="--", linewidth=1)
        left.set(xlabel="peak of memory, GiB (dashed: what there is)", ylabel="tokens a second and GPU", xscale="log")
        left.xaxis.set_major_formatter("{x:g}")
        left.xaxis.set_minor_formatter("{x:g}")
        left.legend(fontsize=8)
        places = {str(one.way): groups.index(one.way.group) for one in self.prices}
        for name, rates in (self.networks or {}).items():
            index = places[name]
            style = LINES[index % len(LINES)]  # lines may lie on each other
            right.plot(NETWORKS, rates, style, color=f"C{index}", marker="o", markersize=3, label=name)
        right.set(xlabel="network of a node, Gb/s", ylabel="tokens a second and GPU", xscale="log", ylim=(0, None))
        right.set_xticks(NETWORKS, [str(rate) for rate in NETWORKS])
        right.minorticks_off()
        right.legend(fontsize=7)
        figure.suptitle(f"{self.ranks} x {self.cluster.name}: estimates")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _within(value: float, error: float) -> list[float]:
    return [value * (1 - error), value * (1 + error)]


def _set(policy: Policy) -> dict[str, Any]:
    """The fields that differ from a default policy's."""
    usual = Policy()
    return {name: value for name, value in vars(policy).items() if value != getattr(usual, name)}


def policy_text(policy: Policy) -> str:
    """The policy as code."""
    parts = []
    for name, value in _set(policy).items():
        if isinstance(value, MixedPrecisionPolicy):
            value = f"MixedPrecisionPolicy({value.param_dtype}, {value.reduce_dtype})"
        else:
            value = repr(value)
        parts.append(f"{name}={value}")
    return f"Policy({', '.join(parts)})"
