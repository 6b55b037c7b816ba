"""Units of a sensible size: small neighbours are merged, large ones are cut between parameters.

    blocks     root 6.0 | layers.0 0.2 | layers.1 0.2 | ... | layers.23 0.2        MiB, bucket_mb=1.2
    units      root/0 1.0 | root/1 5.0 | layers.0-5 1.2 | ... | layers.18-23 1.2

A collective has a latency besides the time for its bytes, so many small ones waste the network. A large one is gathered
and waited for as a whole. Merged parameters stay in the order of registration, which is the order of use in most
models. Packing starts at the end, so that a unit that remains small is the first: forward waits for it with nothing to
hide it, and in backward its reduction is the last. Where a size is given, a root of next to nothing (a final norm, a
small embedding) joins the first unit.

A merged unit is in memory as a whole, and so are its gradients until they are sent, where FSDP2 holds one block and the
next. So that the step takes no more memory than FSDP2's, ``"auto"`` merges at most a part of the model (`MOST_UNITS`),
and never the root, which would keep the units merged with it gathered throughout. Inductor keeps less for backward, so
the peak comes late and there is room for more. PyTorch's own kernels keep as much as FSDP2's: memory is at its highest
where forward ends and backward begins, and the blocks that are used there (`apart_of`) stay as they are.

The root's parameters are used at both ends of the model: as one unit, the embedding would be gathered and reduced with
the head. So the root is cut between its large parameters, each with the small ones beside it. It is not cut in a model
so small that a part would be less than an efficient message, nor along tp, where ranks with parts of different sizes
would cut it at different places.

Where nothing is gathered (``"ddp"``), blocks mean nothing to the network, and parameters are packed into buckets, as
DistributedDataParallel does it; ``bucket.0`` holds the last of them and is reduced first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_compiled.plan.hardware import Cluster
from fsdp_compiled.plan.units import ROOT

MIB = 2**20
EFFICIENT = 8.0  # transfer time over latency: at 8, a collective runs at 89% of the bandwidth
DDP_MIB = 25.0  # DistributedDataParallel's default bucket
MOST_UNITS = {"eager": 6, "inductor": 4}  # automatic merging: a unit is at most one in so many parts of the model
MOST_MIB = 128.0  # nor larger than this, however long a ring of very many ranks takes
MOST_BUCKETS = 2  # as `MOST_UNITS`, where nothing is gathered


def target(
    wanted: float | str,
    blocks: Sequence[str],
    sizes: Sequence[int],
    machine: Cluster,
    world: int,
    gathered: bool,
    most: int = MOST_BUCKETS,
    stride: int = 1,
) -> tuple[float, float, str]:
    """``(merge, split, reason)``: neighbours are merged up to ``merge`` bytes, units over ``split`` bytes are cut.

    ``blocks`` and ``sizes``: each parameter's block, and its bytes on the wire. ``most``: automatic merging makes no
    unit larger than one in so many parts of the model, nor than `MOST_MIB`. ``stride``: of these ranks among all.
    """
    total = sum(sizes)
    if world == 1:
        return 0.0, float("inf"), "one rank: nothing is sent"
    if wanted != "auto":
        given = float(wanted) * MIB
        return given, given or float("inf"), f"bucket_mb={wanted:g}, as given"
    latency = machine.wait(world, stride)
    efficient = min(EFFICIENT * latency * machine.link(world, stride), MOST_MIB * MIB)
    why = f"{efficient / MIB:.2g} MiB take {EFFICIENT:g} times a collective's latency of {latency * 1e6:.3g} us"
    part = total / most
    split = max(4 * efficient, total / MOST_BUCKETS)
    if gathered:
        merge = min(efficient, part)
        bound = "" if merge == efficient else f", but no more than 1/{most} of the model"
        return merge, split, f"bucket_mb={merge / MIB:.2g} (auto): {why}{bound}"
    merge = min(max(efficient, part), max(efficient, DDP_MIB * MIB))
    return (
        merge,
        merge,
        f"bucket_mb={merge / MIB:.2g} (auto): at least {why}, 1/{most} of the model at most 25 MiB",
    )


def apart_of(wanted: float | str, lower: str, sizes: Sequence[int]) -> float | None:
    """How many bytes of blocks at the model's end are not merged; then the root is not merged either. None where
    ``bucket_mb`` is a number: nothing is set apart then."""
    if wanted != "auto":
        return None
    return sum(sizes) / MOST_UNITS[lower] if lower == "eager" else 0.0


def regroup(
    blocks: Sequence[str],
    sizes: Sequence[int],
    merge: float,
    split: float,
    gathered: bool,
    apart: float | None = None,
    cut_root: bool = False,
) -> list[str]:
    """The unit of each parameter. ``blocks``, ``sizes``: as in `target`, in registration order; ``apart``: from
    `apart_of`; ``cut_root``: whether to cut a root that has several large parameters."""
    if not gathered:
        if merge == 0:
            return list(blocks)
        packed = _pack([[index] for index in range(len(sizes))], sizes, merge)
        return _spread(len(sizes), {f"bucket.{len(packed) - 1 - place}": run for place, run in enumerate(packed)})
    members: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        members.setdefault(block, []).append(index)
    names = list(members)
    units: dict[str, list[int]] = {}
    row: list[str] = []
    last = _last(members, sizes, apart or 0.0)

    def close() -> None:
        for packed in _pack([members[name] for name in row], sizes, merge):
            among = list(dict.fromkeys(blocks[index] for index in packed))
            units[name_of(among)] = packed
        row.clear()

    for name in names:
        size = sum(sizes[index] for index in members[name])
        around = name == ROOT or any(other.startswith(f"{name}.") for other in names)
        if around or size > merge or name in last:
            close()
            most = split
            if name == ROOT and cut_root and merge:
                most = min(split, max(4 * merge, merge + max(sizes[index] for index in members[name])))
            units |= _cut(name, members[name], sizes, most) if size > most else {name: members[name]}
        else:
            row.append(name)
    close()
    return _spread(len(sizes), _with_slight_root(units, sizes, merge) if apart is None else units)


def _last(members: Mapping[str, Sequence[int]], sizes: Sequence[int], apart: float) -> set[str]:
    """The last blocks, without the root, that together weigh no more than ``apart`` bytes."""
    found: set[str] = set()
    for name in reversed([name for name in members if name != ROOT]):
        apart -= sum(sizes[index] for index in members[name])
        if apart < 0:
            break
        found.add(name)
    return found


def _with_slight_root(units: dict[str, list[int]], sizes: Sequence[int], merge: float) -> dict[str, list[int]]:
    """The units. A root of at most ``merge / EFFICIENT`` bytes is merged with the first of the others.

    Forward begins with both and backward ends with both. The other unit then stays gathered as long as the root does,
    until backward is through with the model's end. So it must be no larger than ``merge``.
    """
    first = next((name for name in units if name != ROOT), None)
    if ROOT not in units or first is None:
        return units
    root, other = (sum(sizes[index] for index in units[name]) for name in (ROOT, first))
    if root * EFFICIENT > merge or other > merge:
        return units
    joined = {name_of([ROOT, first]): sorted([*units[ROOT], *units[first]])}
    return joined | {name: indices for name, indices in units.items() if name not in (ROOT, first)}


def _pack(items: Sequence[Sequence[int]], sizes: Sequence[int], capacity: float) -> list[list[int]]:
    """Neighbours in runs of at most ``capacity`` bytes, filled from the end; in even runs if there need be no more."""
    runs = _fill(items, sizes, capacity)
    total = sum(sizes[index] for item in items for index in item)
    even = _fill(items, sizes, min(capacity, total / max(len(runs), 1)))
    return even if len(even) == len(runs) else runs


def _fill(items: Sequence[Sequence[int]], sizes: Sequence[int], capacity: float) -> list[list[int]]:
    runs: list[list[int]] = []
    room = 0.0
    for item in reversed(items):
        size = sum(sizes[index] for index in item)
        if not runs or size > room:
            runs.insert(0, [])
            room = capacity
        runs[0] = [*item, *runs[0]]
        room -= size
    return runs


def _cut(name: str, indices: Sequence[int], sizes: Sequence[int], capacity: float) -> dict[str, list[int]]:
    runs = _pack([[index] for index in indices], sizes, capacity)
    return {f"{name}/{place}" if len(runs) > 1 else name: run for place, run in enumerate(runs)}


def name_of(names: Sequence[str]) -> str:
    """``layers.0``, ``layers.1``, ``layers.2`` -> ``layers.0-2``."""
    if len(names) == 1:
        return names[0]
    first, last = names[0], names[-1]
    around, _, end = last.rpartition(".")
    return f"{first}-{end}" if around and first.startswith(f"{around}.") else f"{first}-{last}"


def _spread(count: int, units: dict[str, list[int]]) -> list[str]:
    """The unit of each parameter, made from the parameters of each unit."""
    found = [""] * count
    for name, indices in units.items():
        for index in indices:
            found[index] = name
    return found
