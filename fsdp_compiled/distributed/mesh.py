"""The ranks: this one's place among them, what they exchange, what they agree on, and how they go in step (`lockstep`).

`replace_kernels` works around a fault of gloo, which corrupts memory in one of its two forms of an all-gather. Gloo has
two threads a group. Each notes the name of the operator that it ended in one string of the group, which nothing locks
(`ProcessGroupGloo::runLoop`, ``pgStatus_->lastCompletedWorkName``; torch 2.11 and 2.13). A name of up to 15 letters is
copied in place. A longer one moves memory, and two threads at once free the same: ``malloc(): unaligned tcache chunk
detected``, or a segmentation fault, after some thousands of collectives. Of the operators behind
`torch.ops._c10d_functional` only ``all_gather_into_tensor`` has such a name, since it is a list of one
(``ALLGATHER_COALESCED``). Into a given tensor it is ``_ALLGATHER_BASE``, which is short, and is what FSDP2 sends.

So from a process's first mesh of CPUs on, both all-gathers of CPU tensors gather into tensors that are made here. This
helps PyTorch's own users of them too, such as DTensor. Values, shapes and what is waited for are the same; every
backend of CPUs has this form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
NOTHING = -(2**63)  # smaller than any part of a digest
ENDED = (
    "There is no process group any more: the one that the model was sharded in was ended (dist.destroy_process_group). "
    "Make this call before; or start a process group, and build and shard the model again."
)


class RankError(RuntimeError):
    """Ranks disagree, or one of them failed; raised on every rank."""


class Interrupted(RankError):
    """Another rank was interrupted, and goes on with nothing."""


class Unanimous(ValueError):
    """Raised by every rank in the same place, so nobody needs to be told."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place. ``groups`` names the process group along each axis that has more than one rank, and the user's
    own groups that programs communicate in, once one was made.

    Ranks along ``tp`` see the same batch and hold parts of the same parameters. ``tp_mesh`` is that axis of the
    ``DeviceMesh``; parameters that were cut are DTensors on it. None: the mesh has no such axis. ``given``: the
    ``DeviceMesh`` that this was made of, if any. ``everyone``: the process group of all these ranks; None: the default.
    """

    device: torch.device
    shard: int = 1
    replicate: int = 1
    shard_rank: int = 0
    rank: int = 0
    groups: dict[str, str] = field(default_factory=dict)
    tp: int = 1
    tp_rank: int = 0
    replicate_rank: int = 0
    tp_mesh: DeviceMesh | None = None
    given: DeviceMesh | None = None
    everyone: str | None = None

    def __post_init__(self) -> None:
        if self.groups and self.device.type == "cpu":
            replace_kernels()

    @property
    def row(self) -> int:
        """This rank's place among those with batches of their own."""
        return self.replicate_rank * self.shard + self.shard_rank

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.shard * self.replicate * self.tp

    @property
    def site(self) -> Mesh:
        """The ranks that differ from this one along the shard axis alone; the site of local steps."""
        return replace(self, replicate=1, replicate_rank=0, everyone=self.groups.get("shard"))

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.everyone is None else dist.distributed_c10d._resolve_process_group(self.everyone)


def broadcast(tensor: torch.Tensor, mesh: Mesh, parts: bool = False) -> None:
    """Copies rank 0's values to every rank, in place. ``parts``: each rank along ``tp`` has a part of its own.

    In that case the values are those of the first rank with the same place along ``tp``.
    """
    if mesh.world == 1 or not tensor.numel():
        return
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if mesh.tp == 1:
        dist.broadcast(tensor, 0)
        return
    for axis in ("replicate", "shard") if parts else ("replicate", "shard", "tp"):
        if axis in mesh.groups:
            dist.broadcast(tensor, group=dist.distributed_c10d._resolve_process_group(mesh.groups[axis]), group_src=0)


def gather_parts(part: torch.Tensor, mesh: Mesh) -> list[torch.Tensor]:
    """The parts of the ranks along ``tp``, all of one shape, by place along it."""
    if mesh.tp == 1:
        return [part]
    return [one.view(part.shape) for one in _gather_in(part.reshape(-1), mesh.tp, mesh.groups["tp"]).chunk(mesh.tp)]


def gather_shards(shard: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """``[n]`` on each rank -> ``[shard * n]``, the whole buffer, on every rank."""
    if mesh.shard == 1:
        return shard
    if dist.group.WORLD is None:
        raise RankError(ENDED)
    return _gather_in(shard, mesh.shard, mesh.groups["shard"])


def gather_all(part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """``[n]`` on each rank -> ``[world * n]``, by rank, on every rank."""
    if mesh.world == 1:
        return part
    if dist.group.WORLD is None:
        raise RankError(ENDED)
    return _gather_in(part, mesh.world, mesh.everyone or dist.group.WORLD.group_name)


def _gather_in(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_gather_into_tensor(part, ranks, group))


def exchange(value: Any, mesh: Mesh) -> list[Any]:
    """The values of all ranks, on every rank, by rank; any picklable value."""
    if mesh.world == 1:
        return [value]
    found: list[Any] = [None] * mesh.world
    dist.all_gather_object(found, value, group=mesh.group)
    return found


def from_first(value: Any, mesh: Mesh) -> Any:
    """Rank 0's value, on every rank; any picklable value."""
    if mesh.world == 1:
        return value
    found = [value]
    dist.broadcast_object_list(found, 0)
    return found[0]


def any_rank(flag: bool, mesh: Mesh) -> bool:
    """Whether the flag is set on any rank."""
    return flag if mesh.world == 1 else bool(largest([int(flag)], mesh.group)[0])


def said_by(value: Any, mesh: Mesh) -> list[Any]:
    """Like `exchange`, for a value that most often no rank has: None on each rank costs one small reduction."""
    return exchange(value, mesh) if any_rank(value is not None, mesh) else [None] * mesh.world


def largest(numbers: list[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """For each number, the largest that any rank has; exchanged between hosts if the process group can do that."""
    on_host = "cpu:" in str(dist.get_backend_config())
    tensor = torch.tensor(numbers, device="cpu" if on_host else torch.accelerator.current_accelerator())
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return cast("list[int]", tensor.tolist())


def among(text: str, mesh: Mesh) -> tuple[int, int]:
    """This rank's place among the ranks that have the same text, and how many they are. Sends a digest, 8 bytes a
    rank."""
    own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    found = gather_all(torch.tensor([own], device=mesh.device), mesh).tolist()
    return found[: mesh.rank].count(own), found.count(own)


def agree(
    mesh: Mesh,
    what: str,
    text: str,
    failure: BaseException | None = None,
    own: Callable[[], str] | None = None,
) -> None:
    """Every rank shows its text. If texts differ, or a rank failed, every rank raises.

    The rank that failed raises its own exception, the others a `RankError` that quotes it. Where texts differ, the
    first differing line is shown with the ranks that have it. ``own``: more text, which ranks with the same place
    along ``tp`` have in common. Costs one reduction of some digests, however many ranks there are.
    """
    if mesh.world == 1:
        if failure is not None:
            raise failure
        return
    texts = (text, own() if own is not None and failure is None else "")
    digests = [hashlib.sha256(one.encode()).digest() for one in texts]
    # Numbers are equal if their largest is also minus the largest of their negatives.
    numbers = [NOTHING] * (4 * (1 + mesh.tp))
    for place, digest in zip((0, 1 + mesh.tp_rank), digests, strict=True):
        words = [int.from_bytes(digest[start : start + 8], "little") >> 2 for start in (0, 8)]
        numbers[4 * place : 4 * place + 4] = [words[0], -words[0], words[1], -words[1]]
    failed, *most = largest([int(failure is not None), *numbers])
    if not failed and all(one == -other for one, other in zip(most[::2], most[1::2], strict=True)):
        return
    error = f"{type(failure).__name__}: {failure}" if failure is not None else None
    interrupted = failure is not None and not isinstance(failure, Exception)
    found = exchange((error, mesh.tp_rank, *digests, interrupted), mesh)
    if failure is not None and (interrupted or not any(row[-1] for row in found)):
        raise failure
    for rank, (other, *_, stopped) in enumerate(found):
        if other is not None and (stopped or not any(row[-1] for row in found)):
            kind = Interrupted if stopped else RankError
            raise kind(f"rank {rank} failed, so no rank goes on. It said:\n{other}")
    first: dict[int, int] = {}  # by place along tp, the first rank there
    for rank, (_, place, *_) in enumerate(found):
        first.setdefault(place, rank)
    for which, one in enumerate(texts, 2):
        for rank, row in enumerate(found):
            base = 0 if which == 2 else first[row[1]]
            if row[which] != found[base][which]:
                both = exchange(one if mesh.rank in (base, rank) else "", mesh)
                difference = _difference(both[base], both[rank], base, rank)
                raise RankError(f"{what} differs between rank {base} and rank {rank}.\n{difference}")


def _difference(first: str, other: str, base: int, rank: int) -> str:
    mine, theirs = first.splitlines(), other.splitlines()
    for index in range(max(len(mine), len(theirs))):
        left = mine[index] if index < len(mine) else "(nothing)"
        right = theirs[index] if index < len(theirs) else "(nothing)"
        if left != right:
            return f"  line {index + 1}\n  rank {base}: {left}\n  rank {rank}: {right}"
    return "  (no differing line)"


class Exchange(NamedTuple):
    """A collective that `lockstep` makes itself. Each rank gives a picklable value, and gets those of all, by rank."""

    what: str
    value: Any


Work = Generator[str | Exchange, Any, T]


def lockstep(mesh: Mesh, what: str, work: Work[T]) -> T:
    """Returns what ``work`` returns, if every rank comes to its end by the same collectives.

    Otherwise every rank raises at the same place. The rank that failed raises its own exception, the others a
    `RankError` that quotes it. If their next collectives differ, all raise a `RankError`. Each collective costs one
    small reduction, between hosts.

    A rank that failed between two collectives does not come to the next one, where the others would wait for it
    forever. So ``work`` is a generator that says, before each of its collectives, which one is next:

        def work():
            flat = pack(...)                         may fail here
            yield "broadcast of root"                all ranks are here, or all raise
            dist.broadcast(flat, 0)
            ...                                      and here
            found = yield Exchange("names", own)     what each rank gave, by rank
            return result                            all ranks have come to the end, or all raise
    """
    answer = None
    while True:
        step: str | Exchange = ""
        results, failure = [], None
        try:
            step = work.send(answer)
        except StopIteration as end:
            results, step = [end.value], "the end"
        except BaseException as error:  # one that interrupts, too, would leave the others waiting
            failure = error
        try:
            agree(mesh, what, step.what if isinstance(step, Exchange) else step, failure)
        finally:
            failure = None  # it holds this frame
        if results:
            return results[0]
        answer = exchange(step.value, mesh) if isinstance(step, Exchange) else None


c10d = torch.ops._c10d_functional
given = c10d.all_gather_into_tensor_out.default
_replaced: list[torch.library.Library] = []  # the kernels, for as long as the process lives


def replace_kernels() -> None:
    """Replaces the kernels in this process, once."""
    if not _replaced:
        library = torch.library.Library("_c10d_functional", "IMPL", "CPU")
        library.impl("all_gather_into_tensor", _gather)
        library.impl("all_gather_into_tensor_coalesced", _gather_several)
        _replaced.append(library)


def _gather(tensor: Tensor, world: int, group: str) -> Tensor:
    if tensor.dim() != 1 or tensor.is_complex() or not tensor.is_contiguous():
        return _gather_several([tensor], world, group)[0]
    full = tensor.new_empty(world * len(tensor))  # a flat shard, at half the price of what suits all
    return given(tensor, world, group, out=full)  # type: ignore[no-any-return]


def _gather_several(tensors: list[Tensor], world: int, group: str) -> list[Tensor]:
    """``[n, ...]`` on each rank -> ``[world * n, ...]``, to be waited for; a number -> ``[world]``."""
    dense = [tensor.contiguous() for tensor in tensors]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in dense]
    whole = [tensor.new_empty(world * tensor.numel()) for tensor in real]
    for tensor, full in zip(real, whole, strict=True):
        given(tensor.view(-1), world, group, out=full)
    shaped = [full.view(_shape(tensor, world)) for tensor, full in zip(real, whole, strict=True)]
    pairs = zip(tensors, shaped, strict=True)
    return [torch.view_as_complex(full) if tensor.is_complex() else full for tensor, full in pairs]


def _shape(tensor: Tensor, world: int) -> tuple[int, ...]:
    return (world * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (world,)
