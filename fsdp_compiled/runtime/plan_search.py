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

import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from fsdp_compiled.analysis.roofline import flops
from fsdp_compiled.plan.hardware import GIB, Cluster, bits, gpus
from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.plan_table import NETWORKS, Plans, Price, Way
from fsdp_compiled.runtime.simulate import Estimate, Traced, traced

FEW, MORE = 4, 5  # depths that stand for a deeper model; with fewer blocks, no block is like the others
ROWS = (1, 2, 4, 8)  # numbers of rows in a microbatch, and of ranks along tp, that are tried
PRECISION = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
EVERY = 50  # local steps between two exchanges, where they are proposed
BEST = 6  # ways of which those that wait for the network are also priced with units that stay in their node

Batch = tuple[Any, ...]
Setup = tuple[Callable[[], nn.Module], Callable[..., Any] | None, Batch]


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
    processes: int = 1,
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
    processes
        With 2, another process prices one of the two depths of a deep model meanwhile. It is a new Python, which
        imports the main module again: guard a script with ``if __name__ == "__main__":``.

    Raises ``ValueError`` if nothing can be priced, and as `simulate` does.
    """
    begun = time.perf_counter()
    cluster, ranks = _asked(gpus, node, nic, ranks)
    base = policy or Policy(precision=PRECISION)
    capacity = memory * GIB if memory is not None else (cluster.capacity or float("inf"))
    source = _Source(model, seq)
    asked = {"gpus": f"{ranks}x{cluster.name}", "node": cluster.node, "nic": nic, "batch": batch,
             "seq": seq if source.setup is None else None,
             "memory": memory, "tokens": tokens, "dollars": dollars, "model": _name(model)}  # fmt: skip
    found: list[Price] = []
    reasons: list[str] = []
    full: set[int] = set()  # sizes of tp with which no way fits, so none with more rows will
    two = source.deep and processes > 1
    with ProcessPoolExecutor(1, get_context("spawn")) if two else nullcontext() as other:
        for tp, rows in product(source.cuts(cluster.node, ranks), ROWS):
            own = [way for way in _ways(base, ranks // tp, tp, rows, batch, cluster.node, reasons) if ways(way)]
            own = [way for way in own if source.state(way) < capacity] or own[:1]
            if tp in full or not own:
                continue
            try:
                priced = list(_priced(source, own, cluster, reasons, other))
            except ValueError as error:
                reasons.append(f"tp={tp}, rows={rows}: {error}")
                continue
            found += priced
            if priced and all(price.peak > capacity for price in priced):
                full.add(tp)
        others = [other.submit(_resident).result()] if found and other is not None else []
    if not found:
        why = "; ".join(dict.fromkeys(reasons)) or "No way that is tried divides ranks and batch."
        raise ValueError(f"Nothing can be priced. {why}")

    def best(one: Price) -> tuple[Any, ...]:
        """Sort key: the fastest that fits; of those equally fast to three digits, no offload, then compiled, then the
        least memory."""
        if one.peak > capacity:
            return True, one.peak
        policy = one.way.policy
        return False, -float(f"{one.rate(1):.3g}"), policy.offload, policy.lower != base.lower, one.peak

    found.sort(key=best)
    found = sorted([*found, *_onto_nodes(source, found[:BEST], cluster, ways)], key=best)
    if source.deep:
        while not found[0].whole:
            found = sorted([source.whole(found[0], cluster), *found[1:]], key=best)
    networks = _on_networks(source, [one for one in found if one.peak <= capacity], cluster) if picture else None
    fewer = _fewer_bytes(source, found[0], cluster) if found[0].bound == "network" else {}
    return Plans(
        tuple(found), cluster, ranks, asked, capacity, tokens, dollars, networks, fewer=fewer,
        seconds=time.perf_counter() - begun, resident=(_resident(), *others),
    )  # fmt: skip


def _onto_nodes(
    source: _Source, prices: Sequence[Price], cluster: Cluster, ways: Callable[[Way], bool]
) -> Iterator[Price]:
    """Those of these ways that wait for a network between nodes, with units that stay cut over a node until backward
    (`Policy.reshard_onto`)."""
    for way in [price.way for price in prices if price.bound == "network"]:
        node = max(cluster.node // way.tp, 1)
        if way.policy.shard == "zero3" and way.policy.reshard_onto is None and 1 < node < way.shard:
            other = replace(way, policy=replace(way.policy, reshard_onto=node))
            if way.shard % node == 0 and ways(other):
                yield from _priced(source, [other], cluster, [])


def _resident() -> int:
    """The most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _on_networks(source: _Source, prices: Sequence[Price], cluster: Cluster) -> dict[str, list[float]]:
    """Tokens a second and GPU on each of `NETWORKS`, of the first way of each group: of six groups at most."""
    best = {price.way.group: price for price in reversed(prices)}
    chosen = sorted(best.values(), key=lambda price: -price.rate(1))[:6]
    captured = defaultdict[tuple[int, int], list[Way]](list)
    for price in chosen:
        captured[price.way.tp, price.way.rows].append(price.way)
    others = [replace(cluster, network=bits(f"{rate}Gb/s") * 0.8) for rate in NETWORKS]
    seconds = {price.way: price.elsewhere for own in captured.values()
               for price in _priced(source, own, cluster, [], others=others)}  # fmt: skip
    ranks = {price.way: price.way.shard * price.way.replicate * price.way.tp for price in chosen}
    return {str(one.way): [one.tokens / taken / ranks[one.way] for taken in seconds[one.way]] for one in chosen}


def _asked(given: str | Cluster, node: int, nic: str | None, ranks: int | None) -> tuple[Cluster, int]:
    if node < 1:
        raise ValueError(f"node is {node}; expected the number of GPUs of a node.")
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
    sizes = (inside, 8 * inside, 64 * inside)
    replicas = [1, *(ranks // size for size in sizes if 1 < size < ranks and ranks % size == 0)]
    lowers = dict.fromkeys((base.lower, "eager"))
    fields = product(("zero3", "zero2", "ddp"), replicas, ("auto", "unit"), (False, True), lowers)
    for shard, replicate, recompute, offload, lower in fields:
        if (shard == "ddp" and (replicate > 1 or offload or tp > 1)) or (offload and recompute == "auto"):
            continue
        accumulates = ("shards", "full") if microbatches > 1 and shard != "ddp" and not offload else ("shards",)
        for accumulate in accumulates:
            try:
                policy = replace(
                    base, shard=shard, recompute=recompute, offload=offload, accumulate=accumulate, lower=lower,
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
        self._steps: dict[tuple[int, int, int], Traced] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": {}}  # another process captures by itself

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
            return model_fn, loss, pytree.tree_map_only(torch.Tensor, lambda one: _repeated(one, rows), batch)
        return of_config(self.given, depth, rows, self.seq)

    def tokens(self, rows: int) -> int:
        """Tokens in a microbatch."""
        if self.setup is None:
            return rows * self.seq
        tensors = [one for one in pytree.tree_leaves(self.setup[2]) if isinstance(one, torch.Tensor) and one.dim()]
        if not tensors:
            raise ValueError("The batch that model brings has no tensor with rows; expected that of one row.")
        return rows * (tensors[0].shape[1] if tensors[0].dim() > 1 and not tensors[0].is_floating_point() else 1)

    def captured(self, depth: int, way: Way, cluster: Cluster) -> AbstractContextManager[Traced]:
        model_fn, loss, batch = self.made(depth, way.rows)
        return traced(model_fn, loss, batch, way.mesh, cluster, way.policy)

    def step(self, depth: int, way: Way, cluster: Cluster) -> Traced:
        """The captured step, kept for all ways with these rows and this tp."""
        key = depth, way.tp, way.rows
        if key not in self._steps:
            with self.captured(depth, way, cluster) as step:
                self._steps[key] = step
        return self._steps[key]

    def whole(self, price: Price, cluster: Cluster) -> Price:
        """The same way at the model's whole depth."""
        way = price.way
        with self.captured(self.depth, way, cluster) as step:
            return _price(way, [_figures(_estimate(step, way, cluster))], (self.depth,), self, True)


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


def _estimate(step: Traced, way: Way, cluster: Cluster) -> Estimate:
    return step.estimate(way.policy, way.shard, way.replicate, cluster, way.microbatches)


def _priced(
    source: _Source,
    ways: Sequence[Way],
    cluster: Cluster,
    reasons: list[str],
    other: Executor | None = None,
    others: Sequence[Cluster] = (),
) -> Iterator[Price]:
    """Yields the price of each way that is possible; all have the same tp and rows. ``reasons``: gets why the rest are
    not. ``other``: prices the first of two depths. ``others``: clusters for `Price.elsewhere`."""
    job = partial(_at_depth, source, ways, cluster, others)
    first, *rest = source.depths
    later = other.submit(job, first).result if other is not None else partial(job, first)
    then = list(map(job, rest))
    made = [later(), *then]
    reasons += dict.fromkeys(one for figures in made for one in figures if isinstance(one, str))
    for way, *figures in zip(ways, *made, strict=True):
        known = [one for one in figures if not isinstance(one, str)]
        if len(known) == len(figures):
            yield _price(way, known, source.depths, source)


def _at_depth(
    source: _Source, ways: Sequence[Way], cluster: Cluster, others: Sequence[Cluster], depth: int
) -> list[tuple[float, ...] | str]:
    """By way, its figures at this depth; or why it is not possible: its program needs more than a limit of the policy,
    or its memory cannot be predicted."""
    found: list[tuple[float, ...] | str] = []
    step = source.step(depth, ways[0], cluster)
    for way in ways:
        try:
            made = _estimate(step, way, cluster)
        except ValueError as error:
            found.append(f"{way}: {error}")
            continue
        unknown = f"{way}: its memory cannot be told"
        found.append(unknown if made.memory.unknown else _figures(made, others))
    return found


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
    seconds = {price.way: price.seconds for price in _priced(source, [way, *others.values()], cluster, [])}
    sites = way.shard * way.replicate // site
    exchange = cluster.transfer(4.0 * source.parameters / way.tp / site, sites, site * way.tp, both=True) / EVERY
    parts = {
        change: (seconds[other] + (exchange if other.policy.wire is None else 0.0)) / seconds[way]
        for change, other in others.items()
        if other in seconds
    }
    return {change: part for change, part in parts.items() if part < 1}


def _figures(one: Estimate, others: Sequence[Cluster] = ()) -> tuple[float, ...]:
    """Peak, seconds of a step, of waiting and of products, and operations of forward and backward; then the seconds of
    a step on other clusters."""
    forward = products = 0.0
    nodes = {node.name: node for node in one.program.graph.nodes}
    for span in one.timeline.nodes:
        if span.lane == "compute" and (count := flops(nodes[span.node])):
            products += span.end - span.start
            forward += count if nodes[span.node].meta["phase"] == "forward" else 0
    times, elsewhere = one.microbatches, [one.on(other).seconds for other in others]
    peak = float(one.memory.peak.nbytes)
    return peak, one.seconds, one.exposed, times * products, 3 * times * forward, *elsewhere


def _at(figures: Sequence[tuple[float, ...]], depths: Sequence[int], depth: int) -> tuple[float, ...]:
    """Figures at a depth: as given, or extrapolated linearly from those at two other depths."""
    if len(figures) == 1:
        return figures[0]
    (first, second), (few, more) = figures, depths
    return tuple(one + (other - one) * (depth - few) / (more - few) for one, other in zip(first, second, strict=True))


def _price(
    way: Way, figures: Sequence[tuple[float, ...]], depths: Sequence[int], source: _Source, whole: bool = False
) -> Price:
    peak, seconds, exposed, products, operations, *elsewhere = _at(figures, depths, source.depth)
    tokens = float(source.tokens(way.rows)) * way.microbatches * way.shard * way.replicate
    return Price(way, peak, seconds, exposed / seconds, products / seconds, operations, tokens, whole, tuple(elsewhere))
