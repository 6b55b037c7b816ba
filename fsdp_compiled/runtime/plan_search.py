"""plan: finds the placement, recomputation and microbatches that train a model fastest on GPUs you may rent.

    found = plan(config, "64xH100", node=8, nic="8x400Gb/s", seq=8192, batch=128, tokens=1e12)
    print(found)             a row for each way: fits, peak, step, tokens/s, MFU, exposed, what bounds it, days
    found.best.policy        the Policy to train with

Each way is priced as `simulate` prices it, from the program that would run. The model is captured once for each number
of rows in a microbatch and each size of the tp axis. A model of many equal blocks is captured twice, `FEW` and `MORE`
blocks deep; bytes, seconds and operations are extrapolated linearly. Then the winner is simulated at its whole depth.
If it does not fit, the next one takes its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled.analysis.roofline import computes, flops, seconds_of
from fsdp_compiled.plan.hardware import ERROR, GIB, Cluster, bits, gpus
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.simulate import Estimate, Traced, traced

FEW, MORE = 4, 5  # depths that stand for a deeper model; with fewer blocks, no block is like the others
ROWS = (1, 2, 4, 8)  # numbers of rows in a microbatch, and of ranks along tp, that are tried
PRECISION = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
NETWORKS = (10, 100, 400, 1600, 3200, 12800)  # Gb/s of a node's network, for the picture
WAITS = 0.15  # above this fraction of a step, waiting bounds it
EVERY = 50  # local steps between two exchanges, where they are proposed

Batch = tuple[Any, ...]
Setup = tuple[Callable[[], nn.Module], Callable[..., Any] | None, Batch]


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
        mesh = " x ".join(f"{axis} {size}" for axis, size in _mesh(self).items())
        kept = {"unit": "unit", "auto": "auto"}.get(str(policy.recompute), "none")
        rest = ", offload" if policy.offload else ", full sums" if policy.accumulate == "full" else ""
        return f"{policy.shard} {mesh}, {self.rows}x{self.microbatches} rows, recompute {kept}{rest}"


@dataclass(frozen=True)
class Price:
    """The cost of a way. ``seconds``: of a step. ``exposed``: the fraction in which a rank waits. ``flops``: of a
    rank's forward and backward, without recomputation. ``whole``: simulated at the model's whole depth."""

    way: Way
    peak: float
    seconds: float
    exposed: float
    products: float
    flops: float
    tokens: float
    whole: bool = False

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
    (`plan.hardware.ERROR`). ``fewer``: if the network bounds the best way, policy settings that send fewer bytes at the
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
            "step seconds": one.seconds,
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
        rows = [{**self.row(one), "policy": policy, "mesh": _mesh(one.way), "rows": one.way.rows,
                 "microbatches": one.way.microbatches} for one, policy in zip(self.prices, policies)]  # fmt: skip
        figures = {name: repr(value) for name, value in asdict(self.cluster).items()}
        found = {"inputs": dict(self.inputs), "cluster": figures, "error": self.error, "ways": rows}
        found["fewer bytes"] = dict(self.fewer)
        return json.dumps(found, indent=1)

    def lines(self, most: int = 12) -> Iterator[str]:
        median, worst = self.error
        yield (
            f"{self.ranks} x {self.cluster.name}, nodes of {self.cluster.node}, {len(self.prices)} ways priced; of "
            f"published runs the median was off by {median:.0%}, the worst by {worst:.0%} of the time"
        )
        rows = [self.row(one) for one in self.prices]
        wide = max(len(row["way"]) for row in rows[:most])
        head = f"{'':{wide}}  fits {'peak GiB':>9} {'step s':>8} {'tok/s/GPU':>10} {'MFU':>6} {'exposed':>8}  bound by"
        yield (
            head + (f"{'':8}{'days':>8}" if "days" in rows[0] else "") + (f" {'cost':>11}" if "cost" in rows[0] else "")
        )
        for row in rows[:most]:
            line = (
                f"{row['way']:{wide}}  {'yes' if row['fits'] else 'no':4} {row['peak GiB']:9.1f} "
                f"{row['step seconds']:8.3g} {row['tokens/s/GPU']:10.0f} {row['MFU']:6.1%} {row['exposed']:8.1%}  "
                f"{row['bound by']:16}"
            )
            line += f"{row['days']:8.1f}" if "days" in row else ""
            yield (line + (f" {row['cost']:11,.0f}" if "cost" in row else "")).rstrip()
        if len(rows) > most:
            yield f"... and {len(rows) - most} more"
        yield ""
        if not self.fits(self.best):
            yield f"nothing fits {self.capacity / GIB:.0f} GiB; the least is the first"
        mesh = _mesh(self.best.way)
        device = "cuda" if self.cluster.gpu else "cpu"
        yield f"mesh = init_device_mesh('{device}', {tuple(mesh.values())}, mesh_dim_names={tuple(mesh)})"
        yield f"policy = {policy_text(self.best.way.policy)}"
        yield f"# {self.best.way.rows} rows a rank, {self.best.way.microbatches} microbatches a step"
        if self.fewer:
            parts = (f"{change}, {part:.2f} of its time" for change, part in self.fewer.items())
            yield f"# the network bounds it; fewer bytes, for rounding or delay: {'; '.join(parts)}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def picture(self, path: Path) -> None:
        """Plots throughput over memory for all ways, and over networks for each mesh's best way. Needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
        meshes = list(dict.fromkeys(_mesh_text(one.way) for one in self.prices))
        for mesh in meshes:
            own = [one for one in self.prices if _mesh_text(one.way) == mesh]
            left.scatter([one.peak / GIB for one in own], [one.rate(self.ranks) for one in own], s=18, label=mesh)
        left.axvline(self.capacity / GIB, color="black", linestyle="--", linewidth=1)
        left.set(xlabel="peak of memory, GiB (dashed: what there is)", ylabel="tokens a second and GPU", xscale="log")
        left.legend(fontsize=8)
        for name, rates in (self.networks or {}).items():
            right.plot(NETWORKS, rates, marker="o", markersize=3, label=name)
        right.set(xlabel="network of a node, Gb/s", ylabel="tokens a second and GPU", xscale="log", ylim=(0, None))
        right.legend(fontsize=7)
        figure.suptitle(f"{self.ranks} x {self.cluster.name}: estimates")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _mesh(way: Way) -> dict[str, int]:
    sizes = {"replicate": way.replicate, "shard": way.shard, "tp": way.tp}
    return {axis: size for axis, size in sizes.items() if size > 1 or axis == "shard"}


def _mesh_text(way: Way) -> str:
    return f"{way.policy.shard}, " + ", ".join(f"{axis} {size}" for axis, size in _mesh(way).items())


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


def plan(
    model: Any,
    gpus: str | Cluster = "8xH100",
    node: int = 8,
    nic: str | None = None,
    *,
    ranks: int | None = None,
    seq: int = 2048,
    batch: int | None = None,
    memory: float | None = None,
    tokens: float | None = None,
    dollars: float | None = None,
    ways: Callable[[Way], bool] = lambda way: True,
    policy: Policy | None = None,
    picture: bool = False,
) -> Plans:
    """Prices the ways to train ``model`` on such GPUs.

    model
        A configuration of transformers, for its causal (or sequence-to-sequence) model; or ``(model_fn, loss, batch)``
        as `simulate` takes them, with one row in the batch's tensors.
    gpus, node, nic
        ``"64xH100"``, ranks of a node, and what a node's NICs carry together, ``"8x400Gb/s"``; or a `Cluster` and
        ``ranks``.
    seq, batch
        Tokens in a row, and rows of a step over all ranks; without ``batch``, one microbatch of each rank.
    memory
        GiB of a GPU that a step may use, instead of all its memory.
    tokens, dollars
        Tokens to train on, and dollars for an hour of one GPU: gives days and cost.
    ways, policy
        Which ways are priced, and the policy whose fields they share; without it, precision is bfloat16.
    picture
        Also prices the best ways on other networks, for `Plans.picture`.

    Raises ``ValueError`` if nothing can be priced, and as `simulate` does.
    """
    cluster, ranks = _asked(gpus, node, nic, ranks)
    base = policy or Policy(precision=PRECISION)
    capacity = memory * GIB if memory is not None else (cluster.capacity or float("inf"))
    source = _Source(model, seq)
    asked = {"gpus": f"{ranks}x{cluster.name}", "node": cluster.node, "nic": nic, "batch": batch,
             "seq": seq if source.setup is None else None,
             "memory": memory, "tokens": tokens, "dollars": dollars, "model": _name(model)}  # fmt: skip
    found: list[Price] = []
    samples: dict[str, tuple[Price, Callable[[Cluster], float]]] = {}
    reasons: list[str] = []
    full: set[int] = set()  # sizes of tp with which no way fits, so none with more rows will
    for tp, rows in product(source.cuts(cluster.node, ranks), ROWS):
        own = [way for way in _ways(base, ranks // tp, tp, rows, batch, cluster.node, reasons) if ways(way)]
        own = [way for way in own if source.state(way) < capacity] or own[:1]
        if tp in full or not own:
            continue
        before = len(found)
        try:
            for price, again in _priced(source, own, cluster, rows, reasons):
                found.append(price)
                mesh = _mesh_text(price.way)
                if price.peak <= capacity and (mesh not in samples or price.rate(1) > samples[mesh][0].rate(1)):
                    samples[mesh] = price, again
        except ValueError as error:
            reasons.append(f"tp={tp}, rows={rows}: {error}")
        if len(found) > before and all(price.peak > capacity for price in found[before:]):
            full.add(tp)
    if not found:
        why = "; ".join(dict.fromkeys(reasons)) or "No way that is tried divides ranks and batch."
        raise ValueError(f"Nothing can be priced. {why}")

    def best(one: Price) -> tuple[bool, float, bool, float]:
        """Sort key: the fastest that fits; of those equally fast to three digits, no offload, then the least memory."""
        if one.peak > capacity:
            return True, 0.0, False, one.peak
        return False, -float(f"{one.rate(1):.3g}"), one.way.policy.offload, one.peak

    found.sort(key=best)
    if source.deep:
        while not found[0].whole:
            found = sorted([source.whole(found[0], cluster), *found[1:]], key=best)
    networks = None
    if picture:
        chosen = sorted(samples.values(), key=lambda pair: -pair[0].rate(1))[:6]
        networks = {
            str(price.way): [
                price.tokens / again(replace(cluster, network=bits(f"{rate}Gb/s") * 0.8)) / ranks for rate in NETWORKS
            ]
            for price, again in chosen
        }
    fewer = _fewer_bytes(source, found[0], cluster) if found[0].bound == "network" else {}
    return Plans(tuple(found), cluster, ranks, asked, capacity, tokens, dollars, networks, fewer=fewer)


def _asked(given: str | Cluster, node: int, nic: str | None, ranks: int | None) -> tuple[Cluster, int]:
    if isinstance(given, Cluster):
        if ranks is None:
            raise ValueError("gpus is a Cluster; say how many ranks: ranks=64.")
        return given, ranks
    match = re.fullmatch(r"(\d+)\s*[xX*]\s*(.+)", given.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"gpus is {given!r}; expected a number and a name, such as '64xH100'.")
    if (count := int(match[1])) % node and count > node:
        raise ValueError(f"{count} GPUs are no whole number of nodes of {node}.")
    return gpus(match[2], min(node, count), None if nic is None else bits(nic)), count


def _name(model: Any) -> str:
    return str(getattr(model, "_name_or_path", "") or type(model).__name__)


def _ways(
    base: Policy, ranks: int, tp: int, rows: int, batch: int | None, node: int, reasons: list[str]
) -> Iterator[Way]:
    """All ways that are tried, for ``ranks`` ranks with their own batches. ``reasons``: gets why a policy is not
    possible."""
    microbatches, left = (1, 0) if batch is None else divmod(batch, ranks * rows)
    if microbatches == 0 or left:
        return
    inside = max(node // tp, 1)
    replicas = [1, *(ranks // size for size in (inside, 8 * inside) if 1 < size < ranks and ranks % size == 0)]
    shards = ("zero3", "zero2", "ddp")
    for shard, replicate, recompute, offload in product(shards, replicas, ("auto", "unit"), (False, True)):
        if (shard == "ddp" and (replicate > 1 or offload or tp > 1)) or (offload and recompute == "auto"):
            continue
        accumulates = ("shards", "full") if microbatches > 1 and shard != "ddp" and not offload else ("shards",)
        for accumulate in accumulates:
            try:
                policy = replace(
                    base, shard=shard, recompute=recompute, offload=offload, accumulate=accumulate,
                    tp="auto" if tp > 1 else None,
                )  # fmt: skip
            except ValueError as error:
                reasons.append(str(error))
                continue
            yield Way(replicate, ranks // replicate, tp, rows, microbatches, policy)


class _Source:
    """The model to price, at its depth and at others."""

    def __init__(self, model: Any, seq: int) -> None:
        self.given, self.seq = model, seq
        self.setup = model if isinstance(model, tuple) else None
        self.depth = 0 if self.setup is not None else int(getattr(model, "num_hidden_layers", 0) or 0)

    @cached_property
    def deep(self) -> bool:
        """Whether few blocks stand for all: as far as the number of parameters tells, those past `FEW` are alike."""
        if self.depth <= MORE + 2:
            return False
        few, more = (self._counted(depth)[0] for depth in (FEW, MORE))
        return self.parameters - few == (more - few) * (self.depth - FEW)

    def _counted(self, depth: int) -> tuple[int, int]:
        """The number of parameters, and bytes of them and of AdamW's state of those that are trained."""
        with torch.device("meta"):
            every = list(self.made(depth, 1)[0]().parameters())
        held = sum(one.numel() * one.itemsize * (3 if one.requires_grad else 1) for one in every)
        return sum(one.numel() for one in every), held

    @cached_property
    def _whole(self) -> tuple[int, int]:
        return self._counted(self.depth)

    @property
    def parameters(self) -> int:
        return self._whole[0]

    def cuts(self, node: int, ranks: int) -> tuple[int, ...]:
        """Ranks along tp that are tried; those of one model are in one node."""
        heads = 0 if self.setup is not None else getattr(self.given, "num_key_value_heads", None)
        heads = heads or getattr(self.given, "num_attention_heads", 0) or 0
        cut = (tp for tp in ROWS[1:] if heads and heads % tp == 0 and tp < ranks)
        return (1, *(tp for tp in cut if ranks % tp == 0 and node % tp == 0))

    def state(self, way: Way) -> float:
        """Bytes that a rank holds at least: parameters, AdamW's state of those that are trained, and what stays
        gathered."""
        held = 0 if way.policy.offload else self._whole[1] / way.tp / (1 if way.policy.shard == "ddp" else way.shard)
        return held + (0 if way.policy.shard == "zero3" else 2 * self.parameters / way.tp)

    @property
    def depths(self) -> tuple[int, ...]:
        return (FEW, MORE) if self.deep else (self.depth,)

    def made(self, depth: int, rows: int) -> Setup:
        if self.setup is not None:
            model_fn, loss, batch = self.setup
            return model_fn, loss, tuple(_repeated(one, rows) for one in batch)
        return of_config(self.given, depth, rows, self.seq)

    def tokens(self, rows: int) -> int:
        """Tokens in a microbatch."""
        if self.setup is None:
            return rows * self.seq
        first = next(one for one in self.setup[2] if isinstance(one, torch.Tensor))
        return rows * (first.shape[1] if first.dim() > 1 and not first.is_floating_point() else 1)

    def whole(self, price: Price, cluster: Cluster) -> Price:
        """The same way at the model's whole depth."""
        way = price.way
        with _traced(self, self.depth, way, cluster) as step:
            return _price(way, [_figures(_estimate(step, way, cluster))], (self.depth,), self.depth, price.tokens, True)


def _repeated(one: Any, rows: int) -> Any:
    if not isinstance(one, torch.Tensor) or one.dim() == 0:
        return one
    return torch.empty(one.shape[0] * rows, *one.shape[1:], dtype=one.dtype, device="meta")


def of_config(config: Any, depth: int, rows: int, seq: int) -> Setup:
    """The model of a configuration, ``depth`` blocks deep, its loss and its batch."""
    import copy

    import transformers

    config = copy.deepcopy(config)
    config.use_cache = False
    if depth:
        config.num_hidden_layers = depth
        if "layer_types" in vars(config) and config.layer_types:  # one for each block
            config.layer_types = list(config.layer_types)[:depth]
    both = bool(getattr(config, "is_encoder_decoder", False))
    if both:
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    kind = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM

    def loss(model: nn.Module, tokens: torch.Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    # In float32, whatever dtype its file was saved in: what computes in bfloat16 is the policy.
    return lambda: kind.from_config(config).float(), loss, (torch.empty(rows, seq, dtype=torch.int64, device="meta"),)


def _traced(source: _Source, depth: int, way: Way, cluster: Cluster) -> Any:
    model_fn, loss, batch = source.made(depth, way.rows)
    return traced(model_fn, loss, batch, _mesh(way), cluster, way.policy)


def _estimate(step: Traced, way: Way, cluster: Cluster) -> Estimate:
    return step.estimate(way.policy, way.shard, way.replicate, cluster, way.microbatches)


def _priced(
    source: _Source, ways: Sequence[Way], cluster: Cluster, rows: int, reasons: list[str]
) -> Iterator[tuple[Price, Callable[[Cluster], float]]]:
    """Yields each way's price, and a function that gives the seconds of its step on another cluster. ``reasons``: gets
    why some ways are not possible."""
    by_depth: list[list[Estimate | None]] = []
    for depth in source.depths:
        with _traced(source, depth, ways[0], cluster) as step:
            by_depth.append([_attempt(step, way, cluster, reasons) for way in ways])
    tokens = float(source.tokens(rows))
    for way, *made in zip(ways, *by_depth, strict=True):
        known = [one for one in made if one is not None]
        if len(known) < len(made):
            continue
        step_tokens = tokens * way.microbatches * way.shard * way.replicate
        price = _price(way, list(map(_figures, known)), source.depths, source.depth, step_tokens)

        def again(other: Cluster, known: Sequence[Estimate] = known) -> float:
            return _at([(one.on(other).seconds,) for one in known], source.depths, source.depth)[0]

        yield price, again


def _fewer_bytes(source: _Source, best: Price, cluster: Cluster) -> dict[str, float]:
    """`Plans.fewer`: 8-bit messages, and local steps, whose sites are the replicas, or single ranks under ``"ddp"``. It
    prices a step of one site, and adds its part of an exchange, which averages all parameters."""
    way, others = best.way, dict[str, Way]()
    if way.tp == 1 and not way.policy.offload and way.policy.wire is None:
        with suppress(ValueError):  # beside another field that was given
            others['wire="int8"'] = replace(way, policy=replace(way.policy, wire="int8"))
    site = 1 if way.policy.shard == "ddp" else way.shard
    if site < way.shard * way.replicate:
        others[f"sync_every={EVERY}"] = replace(way, replicate=1, shard=site)
    priced = _priced(source, [way, *others.values()], cluster, way.rows, [])
    seconds = {price.way: price.seconds for price, _ in priced}
    sites = way.shard * way.replicate // site
    exchange = cluster.transfer(4.0 * source.parameters / way.tp / site, sites, site * way.tp, both=True) / EVERY
    parts = {
        change: (seconds[other] + (exchange if other.policy.wire is None else 0.0)) / seconds[way]
        for change, other in others.items()
        if other in seconds
    }
    return {change: part for change, part in parts.items() if part < 1}


def _attempt(step: Traced, way: Way, cluster: Cluster, reasons: list[str]) -> Estimate | None:
    """The estimate; None if the policy is not possible, for example if the program needs more than its limit, or if its
    memory cannot be predicted."""
    try:
        found = _estimate(step, way, cluster)
    except ValueError as error:
        reasons.append(f"{way}: {error}")
        return None
    if found.memory.unknown:
        reasons.append(f"{way}: its memory cannot be told")
        return None
    return found


def _figures(one: Estimate) -> tuple[float, ...]:
    """Peak, seconds of a step, of waiting and of products, and operations of forward and backward."""
    forward = products = 0.0
    fused = one.plan.policy.lower == "inductor"
    nodes = one.program.graph.nodes
    for node, seconds in zip(nodes, seconds_of(one.program.graph, one.plan.machine, fused), strict=True):
        if computes(node) and (count := flops(node)):
            products += seconds
            forward += count if node.meta["phase"] == "forward" else 0
    times = one.microbatches
    return float(one.memory.peak.nbytes), one.seconds, one.exposed, times * products, 3 * times * forward


def _at(figures: Sequence[tuple[float, ...]], depths: Sequence[int], depth: int) -> tuple[float, ...]:
    """Figures at a depth: as given, or extrapolated linearly from those at two other depths."""
    if len(figures) == 1:
        return figures[0]
    (first, second), (few, more) = figures, depths
    return tuple(one + (other - one) * (depth - few) / (more - few) for one, other in zip(first, second, strict=True))


def _price(
    way: Way,
    figures: Sequence[tuple[float, ...]],
    depths: Sequence[int],
    depth: int,
    tokens: float,
    whole: bool = False,
) -> Price:
    peak, seconds, exposed, products, operations = _at(figures, depths, depth)
    return Price(way, peak, seconds, exposed / seconds, products / seconds, operations, tokens, whole)
