"""Runs the user's own model in eager PyTorch on sharded parameters, and collects its gradients.

    forward     a unit is gathered where it is read, and freed some units later: no rank holds the model
    backward    gathered again; a parameter's gradient goes to host memory as soon as it is there
    means       a unit at a time: the gradients of all ranks, averaged

Along tp the model reads a parameter as the DTensor that the plan made of it. The gradient is that of this rank's part.

Afterwards these are restored if the model's code changed them: buffers, the batch, tensors and containers that modules,
the loss's closure and its globals hold, and Python's and numpy's random states. Objects that the code reaches in other
ways are not restored, nor are effects outside the process (files, prints).
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fsdp_compiled.capture.model_tensors import opened
from fsdp_compiled.capture.tensor_parallel import joined, loss_parallel, own_part
from fsdp_compiled.distributed.mesh import Mesh, RankError, exchange, gather_all, said_by
from fsdp_compiled.kernels.operators import operators
from fsdp_compiled.plan.make_plan import SCALED
from fsdp_compiled.plan.plan import Buffer, Plan, Slot
from fsdp_compiled.plan.rows import whole, widths
from fsdp_compiled.runtime.eager_comparison import sent_apart
from fsdp_compiled.runtime.parameters.sharded_parameter import WholeParameter
from fsdp_compiled.runtime.parameters.sharded_tensor import ShardedTensor
from fsdp_compiled.torch_private.modes import run_backward

ALIVE = 4  # buffers that stay gathered at once
CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
CPU = torch.device("cpu")
Place = tuple[str, str]  # of a parameter: its buffer's key, and its name


class EagerRun(TorchFunctionMode):
    """Inside, an operator that is given a parameter gets the whole one; its whole buffer is gathered for a while.

    Ranks may read units in different orders, or skip some. Before each gather every rank says which unit it wants. All
    ranks take part in all of these gathers, until none wants one (`end`). So no rank hangs if the model takes different
    paths on two ranks. ``place_of``: a parameter's place, None for other tensors; ``shards``: this rank's, by key.
    ``apart``: parameters that lie in no buffer, gathered already, by name; the key of their places is "".
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        shards: Mapping[str, torch.Tensor],
        place_of: Callable[[torch.Tensor], Place | None],
        apart: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.apart = apart or {}
        self._plan, self._mesh, self._shards, self._place_of = plan, mesh, shards, place_of
        self._buffers = {buffer.key: buffer for buffer in plan.buffers}
        self._slots = {buffer.key: {slot.name: (place, slot) for place, slot in enumerate(buffer.slots)}
                       for buffer in plan.buffers}  # fmt: skip
        self._alive: OrderedDict[str, torch.Tensor] = OrderedDict()  # whole buffers; the one read last is last
        self._values: dict[str, dict[str, torch.Tensor]] = {}  # the parameters in them
        self._read: dict[str, dict[str, torch.Tensor]] = {}  # the same, as autograd tracks them
        self._cut = plan.placement.parameter and mesh.shard > 1
        self._owners = exchange((mesh.shard_rank, mesh.tp_rank), mesh) if self._cut else []
        self._token = torch.zeros((), requires_grad=True)  # the leaf through which backward reaches only parameters
        self._state: set[int] = set()  # data pointers of tensors that are restored after forward
        self.gradients: dict[str, torch.Tensor] = {}  # this rank's, whole, by parameter's name
        self.buffers: dict[str, torch.Tensor] = {}  # the model's, as forward left them

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._whole, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self._place_of(tensor)
        if place is None:
            return tensor
        return self._parameter(*place) if place[0] else self.apart[place[1]]

    def _parameter(self, key: str, name: str) -> torch.Tensor:
        """The whole parameter as the model's code reads it. Its gradient goes to `take`."""
        value, known = self._value(key, name), self._read[key]
        _, slot = self._slots[key][name]
        if slot.leaf.trainable and torch.is_grad_enabled():
            if name not in known:
                known[name] = _Read.apply(self._token, self, name, [value])
            value = known[name]
        tp, mesh = slot.leaf.tp, self._mesh.tp_mesh
        return value if tp is None or mesh is None else joined(value, tp, mesh)

    def _value(self, key: str, name: str) -> torch.Tensor:
        flat, known = self._flat(key), self._values[key]
        if name not in known:
            known[name] = self._cut_out(self._buffers[key], *self._slots[key][name], flat).detach()
        return known[name]

    def _cut_out(self, buffer: Buffer, place: int, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
        if not buffer.by_rows:
            return slot.of(flat)
        ranks = self._mesh.shard
        width = widths(buffer, ranks)[place]
        return whole(flat.view(ranks, -1)[:, slot.offset : slot.offset + width], slot.leaf, ranks)

    def rounded(self) -> dict[str, torch.Tensor]:
        """By buffer, how far `Policy.wire` may move the gradients that are there now."""
        if (form := self._plan.policy.wire) is None:
            return {}
        found = {}
        for buffer in self._trained():
            flat = torch.zeros(buffer.numel)
            for slot in buffer.slots:
                if slot.name in self.gradients:
                    slot.of(flat).copy_(self.gradients[slot.name])
            found[buffer.key] = sent_apart(flat, form)
        return found

    def _trained(self) -> Iterator[Buffer]:
        return (one for one in self._plan.buffers if one.trainable and one.dtype.is_floating_point)

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Adds a gradient to those in host memory. It comes in parts if its parameter was freed in between."""
        found = gradient.detach().to(CPU, torch.promote_types(gradient.dtype, torch.float32))
        self.gradients[name] = self.gradients[name] + found if name in self.gradients else found

    def _flat(self, key: str) -> torch.Tensor:
        """The whole buffer, in the compute dtype."""
        if key not in self._alive:
            found = self._round(key)[key] if self._cut else self._own(self._buffers[key])
            self._alive[key], self._values[key], self._read[key] = found, {}, {}
            while len(self._alive) > ALIVE:
                self._forget(next(iter(self._alive)))
        self._alive.move_to_end(key)
        return self._alive[key]

    def _forget(self, *keys: str) -> None:
        for key in keys:
            del self._alive[key], self._values[key], self._read[key]

    def _own(self, buffer: Buffer) -> torch.Tensor:
        return self._shards[buffer.key].detach().to(self._plan.device, self._plan.compute_dtype(buffer))

    def _sent(self, own: torch.Tensor) -> torch.Tensor:
        """The values as ``Policy.wire`` rounds them in messages."""
        if (form := self._plan.policy.wire) is None or not own.is_floating_point():
            return own
        return operators.unpack(operators.pack(own, 1, form=form), 1, own.numel(), own.dtype, form=form)

    @torch.no_grad()
    def _round(self, wanted: str | None) -> dict[str, torch.Tensor]:
        """Gathers each buffer that some rank wants now: ``[numel / shard]`` on each rank -> ``[numel]``. Collective."""
        found = {}
        for key in sorted({one for one in exchange(wanted, self._mesh) if one is not None}):
            own = self._sent(self._own(self._buffers[key]).contiguous())
            rows = gather_all(own, self._mesh).view(len(self._owners), -1)
            places = [(place, self._mesh.tp_rank) for place in range(self._mesh.shard)]
            found[key] = torch.cat([rows[self._owners.index(place)] for place in places])
        return found

    @contextlib.contextmanager
    def reading(
        self, model: nn.Module, loss: Callable[..., Any] | None, others: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """The context of forward. At its end, everything that the model's code may have written is restored, and
        ``buffers`` are what it left."""
        keeping = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with self.put_back(model, loss, others) as self._state, keeping, self._whole_parts(), self:
            yield
            self.buffers = {name: own_part(one.detach()).clone() for name, one in model.named_buffers()}

    def put_back(
        self, model: nn.Module, loss: Callable[..., Any] | None, others: Sequence[torch.Tensor] = ()
    ) -> contextlib.AbstractContextManager[set[int]]:
        """Around what runs the model's code: `_put_back` of all but sharded parameters."""
        return _put_back(model, loss, others, lambda one: self._place_of(one) is None)

    def backward(self, results: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> None:
        """Fills ``gradients``. It runs on the calling thread, since another thread would not gather."""
        with self, self._whole_parts(), torch.autograd.set_multithreading_enabled(False):
            leaves = {name: one for name, one in self.apart.items() if one.requires_grad}
            run_backward(results, tangents, [self._token, *leaves.values()])
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                self.take(name, leaf.grad)

    @contextlib.contextmanager
    def _whole_parts(self) -> Iterator[None]:
        """Inside, ``parameter.to_local()`` is of the whole parameter, and the loss works on parts of logits."""
        thread = threading.get_ident()

        def asked(own: Callable[..., Any]) -> Callable[..., Any]:
            def to_local(tensor: torch.Tensor, **named: Any) -> Any:
                found = self._whole(tensor) if threading.get_ident() == thread else tensor
                if found is tensor:
                    return own(tensor, **named)
                return found.to_local(**named) if isinstance(found, DTensor) else found

            return to_local

        with contextlib.ExitStack() as stack:
            for kind in (DTensor, ShardedTensor, WholeParameter):
                stack.enter_context(patch.object(kind, "to_local", asked(kind.to_local)))
            stack.enter_context(loss_parallel() if self._mesh.tp > 1 else contextlib.nullcontext())
            yield

    def end(self, failure: Exception | None, what: str, after: str) -> None:
        """Takes part in the gathers that other ranks still need. Collective.

        Raises `RankError` on every rank if one failed. ``what``: what failed; ``after``: the state that all are in
        then.
        Along tp others may wait for this rank in what the model's code does: then it raises alone (`Calls.together`).
        """
        self._forget(*self._alive)
        if failure is not None and self._mesh.tp > 1:
            raise RuntimeError(f"Policy.verify: {what}. It said:\n{type(failure).__name__}: {failure}") from failure
        while self._cut and self._round(None):
            pass
        error = f"{self._mesh.rank} {what}. It said:\n{type(failure).__name__}: {failure}"
        told = said_by(None if failure is None else error, self._mesh)
        if (first := next((one for one in told if one is not None), None)) is not None:
            raise RankError(f"Policy.verify: on rank {first}\n{after}") from failure

    def means(
        self, weight: float, rounded: Mapping[str, torch.Tensor], others: Sequence[Buffer] = ()
    ) -> Iterator[tuple[Buffer, dict[str, torch.Tensor], torch.Tensor]]:
        """Yields each buffer with the whole mean gradients, by name, of its parameters that any rank's results depend
        on, and with the mean of `rounded`, empty without a wire. Collective.

        ``weight``: the weight of this rank's gradients in the mean; ``others``: buffers outside of the plan.
        """
        for buffer in [*self._trained(), *others]:
            dtype = torch.promote_types(buffer.dtype, torch.float32)
            own = [self.gradients.pop(slot.name, None) for slot in buffer.slots]
            reached = torch.tensor([one is not None for one in own], dtype=dtype, device=self._plan.device)
            parts = [
                torch.zeros(slot.leaf.shape, dtype=dtype, device=self._plan.device) if one is None or not weight
                else one.to(self._plan.device, dtype) * weight
                for slot, one in zip(buffer.slots, own, strict=True)
            ]  # fmt: skip
            blocks = buffer.numel // SCALED if self._plan.policy.wire else 0
            moved = rounded.get(buffer.key) if weight else None
            parts.append(reached.new_zeros(blocks) if moved is None else moved.to(reached) * weight)
            rows = reached.new_zeros(self._mesh.tp, len(own) + sum(part.numel() for part in parts))
            message = rows[self._mesh.tp_rank]
            torch.cat([reached, *(part.reshape(-1) for part in parts)], out=message)
            if self._mesh.world > 1:
                dist.all_reduce(rows, group=self._mesh.group)
            any_, *sums = message.split([len(own), *(part.numel() for part in parts)])
            means = {
                slot.name: total.view(slot.leaf.shape)
                for slot, total, reached_ in zip(buffer.slots, sums[:-1], any_.tolist(), strict=True) if reached_
            }  # fmt: skip
            yield buffer, means, sums[-1]

    def _pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps: a whole parameter's place; a copy of a tensor that is restored; else the tensor."""
        if isinstance(tensor, DTensor):
            kept = self._pack(tensor.detach().to_local())
            return kept, tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride()
        if type(tensor) not in (torch.Tensor, nn.Parameter):  # such as a pending result of a collective along tp
            return tensor
        start = tensor.untyped_storage().data_ptr()
        for key, values in self._values.items() if self._cut else ():
            for name, value in values.items():
                if value.untyped_storage().data_ptr() == start and tensor.dtype == value.dtype:
                    return key, name, tensor.size(), tensor.stride(), tensor.storage_offset() - value.storage_offset()
        return tensor.clone() if start in self._state else tensor

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if not isinstance(kept[0], str):
            part, mesh, placements, shape, steps = kept
            return DTensor.from_local(self._unpack(part), mesh, placements, run_check=False, shape=shape, stride=steps)
        key, name, size, stride, offset = kept
        value = self._value(key, name)
        return value.as_strided(size, stride, value.storage_offset() + offset)


class _Read(torch.autograd.Function):
    """Reads a whole parameter so that the graph does not keep it alive, as it would keep a leaf."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, run: EagerRun, name: str, value: list[torch.Tensor]) -> torch.Tensor:
        ctx.run, ctx.name = run, name
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.run.take(ctx.name, gradient)
        return None, None, None, None


@contextlib.contextmanager
def _put_back(
    model: nn.Module, loss: Callable[..., Any] | None, others: Sequence[torch.Tensor],
    apart: Callable[[torch.Tensor], bool],
) -> Iterator[set[int]]:  # fmt: skip
    """At its end, restores everything that the model's code may have written. Yields the data pointers of the tensors
    among it. ``apart``: whether a tensor is no sharded parameter."""
    codes = [_forward(module) for module in model.modules()]
    codes += [
        hook for one in model.modules() for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values())
    ]
    functions = [one for one in (loss, getattr(loss, "__func__", None), *codes) if one is not None]
    cells = [cell for one in functions for cell in getattr(one, "__closure__", None) or () if _filled(cell)]
    contents = [cell.cell_contents for cell in cells]
    tables: list[dict[str, Any]] = [vars(module) for module in model.modules()]
    tables += [vars(loss)] if hasattr(loss, "__dict__") and not isinstance(loss, nn.Module) else []
    held = [value for table in tables for value in table.values()] + contents
    names = [(one.__globals__, name) for one in functions if hasattr(one, "__code__") for name in one.__code__.co_names]
    names = [(table, name) for table, name in names if name in table]
    held += [table[name] for table, name in names]
    held += [value for one in functions for value in getattr(one, "__defaults__", None) or ()]
    globals_before = [table[name] for table, name in names]
    boxes = list({id(one): one for one in [*tables, *held] if type(one) in CONTAINERS}.values())
    copies = [one.copy() for one in boxes]
    inside = [one for box in boxes for one in (box.values() if isinstance(box, dict) else box)]
    own = [one for one in [*held, *inside, *others] if isinstance(one, torch.Tensor) and apart(one)]
    tensors = {id(inner): inner for one in own for _, inner in opened("", one)}
    kept = [(one, one.detach().clone()) for one in tensors.values() if not one.is_inference()]
    states = random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield {one.untyped_storage().data_ptr() for one, _ in kept}
    finally:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
        for box, copy in zip(boxes, copies, strict=True):
            if not _same(box, copy):
                box.clear()
                box.extend(copy) if isinstance(box, list | deque) else box.update(copy)
        for (table, name), value in zip(names, globals_before, strict=True):
            table[name] = value
        for cell, value in zip(cells, contents, strict=True):
            cell.cell_contents = value
        with torch.no_grad():
            for tensor, value in kept:  # not by version: BatchNorm's kernels write without raising it
                if not _equal(tensor, value):
                    tensor.detach().copy_(value)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values; NaN is NaN."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _forward(module: nn.Module) -> Any:
    return getattr(type(module).forward, "__wrapped__", type(module).forward)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False


def _same(box: Any, copy: Any) -> bool:
    """Whether a container holds the same objects, in the same order, as it did."""
    mine, others = [[*one.items()] if isinstance(one, dict) else [*one] for one in (box, copy)]
    pairs = [[item if isinstance(item, tuple) else (item,) for item in one] for one in (mine, others)]
    return len(mine) == len(others) and all(
        len(one) == len(two) and all(map(is_, one, two)) for one, two in zip(*pairs, strict=True)
    )
