"""The parameters of one `fully_shard` call: DTensors that are slices of flat shards.

    module.weight    nn.Parameter of a DTensor, [6, 4], Shard(0) on the mesh     the user's optimizer, checkpoints ...
                       its local tensor: rows 0 to 2, a view of
    flat shard       [n]                                                         what programs gather

A flat shard holds this rank's rows of all parameters of a dtype (`plan.rows`), so that one collective gathers them, and
a write to a parameter is a write to the memory that is gathered. Where a parameter or its memory is replaced
(`Module.to_empty`, `load_state_dict(assign=True)`), the new values move into a new flat shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_compiled.capture.tensor_parallel import joined
from fsdp_compiled.distributed.device_mesh import beside
from fsdp_compiled.distributed.mesh import Mesh, gather_shards
from fsdp_compiled.plan.leaf import Leaf, TensorParallel, check_class, contiguous_stride
from fsdp_compiled.plan.plan import Buffer, Division, Part
from fsdp_compiled.plan.rows import lay_out_by_rows, own_rows, whole, widths
from fsdp_compiled.runtime.fsdp.extended_parameter import Extended, extends, rows_of
from fsdp_compiled.runtime.fsdp.local_updates import OURS, register_hooks
from fsdp_compiled.runtime.tensor_parallel.parts import local_part, tensor_parallel
from fsdp_compiled.torch_private.dtensor import DTensorSpec, StridedShard, TensorMeta

Holder = tuple[nn.Module, str]  # a place that holds a parameter: module._parameters[name]
ENTRY = "_fsdp_compiled_entry"  # the plain parameter's attribute: the entry that replaced it
NOTHING = Part(0, 0, 0)


# Implemented in C, since each call reads these of all parameters.
_versions_of = attrgetter("parameter._version", "local._version")
_local_now_and_then = attrgetter("parameter._local_tensor", "local")


def put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Registers it; `nn.LSTM` and its like keep their weights in a list besides."""
    if isinstance(module, nn.RNNBase):
        setattr(module, name, parameter)
    else:
        module._parameters[name] = parameter


@dataclass(eq=False)
class Entry:
    """One parameter. ``part``: its elements in the flat shard; ``local``: the view of them."""

    parameter: nn.Parameter
    holders: list[Holder]
    spec: DTensorSpec
    tp: TensorParallel | None = None  # for a parameter that `parallelize_module` cut, or made whole on each rank
    shard_dim: int = 0
    part: Part = NOTHING
    local: torch.Tensor | None = None

    def tie(self, holder: Holder) -> None:
        """Puts the parameter at this place too, where the plain parameter was that it replaced."""
        (module, name), (first, known) = holder, self.holders[0]
        put(module, name, first._parameters[known])
        self.holders.append(holder)

    @property
    def leaf(self) -> Leaf:
        """The plan's leaf, without names, which depend on the model that is called. Along tp: of this rank's part."""
        shape = tuple(self.parameter.shape)
        if self.tp is not None and self.tp.dim is not None:
            parts = self.spec.mesh.size(-1)
            shape = tuple(size // parts if dim == self.tp.dim else size for dim, size in enumerate(shape))
        return Leaf((self.holders[0][1],), shape, contiguous_stride(shape), self.parameter.dtype,
                    self.parameter.requires_grad, None, "", tp=self.tp, shard_dim=self.shard_dim)  # fmt: skip


@dataclass(eq=False)
class FlatShard:
    """This rank's rows of parameters of one dtype and device, cut alike along tp, that were all trained, or all frozen,
    when it was laid out."""

    group: ParameterGroup
    tensor: torch.Tensor
    buffer: Buffer
    entries: list[Entry]
    current: bool = True  # False once another flat shard has replaced it
    held: torch.Tensor | None = None  # this rank's gradients that are not reduced yet, ``[shard * n]``
    held_of: dict[Entry, None] = field(default_factory=dict)  # the parameters whose gradients in ``held`` count
    partial: torch.Tensor | None = None  # gradients reduced along the shard axis, not yet over replicas, ``[n]``
    partial_of: dict[Entry, None] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether gradients are held back for a later backward."""
        return self.held is not None or self.partial is not None

    @property
    def written(self) -> tuple[Any, ...]:
        """A value that changes with each write to a parameter, or directly to its local tensor."""
        return self.tensor._version, *map(_versions_of, self.entries)

    def hold(self, gradient: torch.Tensor, entries: Iterable[Entry]) -> None:
        """Adds a whole flat gradient to ``held``. ``entries``: the parameters whose parts of it count."""
        self.held = gradient if self.held is None else self.held.add_(gradient)
        self.held_of.update(dict.fromkeys(entries))

    def release(self) -> tuple[torch.Tensor, list[Entry]]:
        """The held-back gradients and their parameters. Nothing is held back afterwards."""
        held, entries = self.held, list(self.held_of)
        assert held is not None
        self.held = None
        self.held_of.clear()
        return held, entries

    def drop(self) -> None:
        """Drops the gradients that were held back."""
        self.held = self.partial = None
        self.held_of.clear()
        self.partial_of.clear()


def part_of(flat: torch.Tensor, first: int, last: int, shape: Sequence[int]) -> torch.Tensor:
    """A view of these elements of a flat shard, in the same memory but with a storage offset of zero.

    A DTensor reports its local tensor's offset as its own, but its own storage is empty. With another offset than zero,
    neither ``copy.deepcopy`` nor ``torch.save`` can read it.
    """
    if flat.is_meta:
        return flat[first:last].view(shape)
    begin, size = flat.storage_offset(), flat.itemsize
    memory = flat.untyped_storage()[(begin + first) * size : (begin + last) * size]
    return flat.new_empty(0).set_(memory, 0, shape)  # type: ignore[call-overload, no-any-return]


def check_divided(where: str, value: torch.Tensor, tp: TensorParallel | None, dim: int, ranks: int) -> None:
    """Raises ``NotImplementedError`` where ranks would have parts of different sizes of another dim than the first."""
    parts = ranks * (tp.parts if tp is not None and tp.dim == dim else 1)
    if dim and value.shape[dim] % parts:
        raise NotImplementedError(
            f"fully_shard does not support uneven sharding on dim {dim}: {where} has shape {list(value.shape)}; "
            f"expected a multiple of {parts}, the ranks. Return a dim that is one in shard_placement_fn, or Shard(0), "
            "whose rows need not be."
        )


class ParameterGroup:
    """The parameters of one `fully_shard` call, which are gathered together."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        holders: Sequence[list[Holder]],
        shard_dims: Sequence[int],
        device_mesh: DeviceMesh,
        mesh: Mesh,
        precision: MixedPrecisionPolicy,
        reshard: bool | int,
    ) -> None:
        self.modules, self.device_mesh, self.mesh = tuple(modules), device_mesh, mesh
        self.all_axes = beside(device_mesh, mesh.tp_mesh) if mesh.tp_mesh is not None else device_mesh
        self.precision, self.reshard_after_forward = precision, reshard
        self.synchronise = True  # whether backward reduces gradients
        self.all_reduces = True  # whether it all-reduces them over replicas
        self.pads = False  # whether parameters that backward does not reach get a gradient of zeros
        self.gathered = False  # whether a forward that trains has gathered them
        self.division = Division()
        self.all_reduce_hook: Callable[[torch.Tensor], Any] | None = None
        self.holding: list[Any] = []  # the `ModulePlan`s with this group, of modules whose backward held gradients back
        self.version = 0  # increases with each new layout of the flat shards
        self.flats: list[FlatShard] = []
        self.extended: list[Extended] = []  # parameters of FSDP2's extension protocol
        self.replaced: list[tuple[weakref.ref[nn.Parameter], nn.Parameter]] = []  # (plain, its replacement)
        self.unsharded: list[tuple[nn.Parameter, int]] = []  # with their versions, between `unshard` and `reshard`
        register_hooks()
        entries = []
        for places, dim in zip(holders, shard_dims, strict=True):
            module, name = places[0]
            plain = module._parameters[name]
            assert plain is not None
            entry = self._shard(plain, places, dim)
            if extends(plain):
                self.extended.append(Extended(entry, self))
            else:
                entries.append(entry)
        self._lay_out(entries)

    @property
    def entries(self) -> Iterator[Entry]:
        yield from (entry for flat in self.flats for entry in flat.entries)
        yield from (one.entry for one in self.extended)

    @property
    def treated(self) -> tuple[Any, ...]:
        """The group's settings that a plan depends on, besides the parameters."""
        return self.version, self.reshard_after_forward, self.division, self.all_reduce_hook is not None

    def same(self) -> bool:
        """Whether all parameters are still slices of the flat shards. Does not see changes to a module's tables."""
        return all(all(starmap(is_, map(_local_now_and_then, flat.entries))) for flat in self.flats) and all(
            one.local is one.entry.local for one in self.extended
        )

    def follow(self) -> None:
        """Adopts the parameters that the modules hold now. Lays the flat shards out anew if any has changed.

        Raises ``ValueError`` for a parameter that is no DTensor on the mesh, or was deleted.
        """
        changed = not self.same()
        for entry in self.entries:
            module, name = entry.holders[0]
            now = module._parameters.get(name)
            if now is entry.parameter:
                continue
            where = f"{type(module).__name__}.{name}"
            if now is None:
                raise ValueError(f"{where} was deleted after fully_shard. Put it back, or build the model again.")
            if not isinstance(now, DTensor):
                raise ValueError(
                    f"{where} was replaced by a plain tensor after fully_shard. Give it a DTensor: "
                    "nn.Parameter(distribute_tensor(tensor, old.device_mesh, old.placements)); or copy_ into the old."
                )
            if now.device_mesh != self.all_axes or now.placements != entry.spec.placements:
                raise ValueError(
                    f"{where} was replaced by a DTensor with placements {now.placements}, where fully_shard has "
                    f"{entry.spec.placements}. Redistribute it: tensor.redistribute(placements=old.placements)."
                )
            check_divided(where, now, entry.tp, entry.shard_dim, self.mesh.shard)
            if now.grad_fn is not None and torch.is_grad_enabled():
                raise ValueError(
                    f"{where} was replaced by a result of {now.grad_fn.name()}, as torch.func.functional_call may do, "
                    "and backward leaves gradients with parameters: what it was computed from would get none. Compute "
                    "it in forward, for example by torch.nn.utils.parametrize; or replace it by its detach()."
                )
            local = now._local_tensor
            if extends(local) != any(one.entry is entry for one in self.extended):
                raise ValueError(
                    f"{where} was replaced by a DTensor of a {type(local).__name__} after fully_shard, and was one of "
                    f"a {type(entry.local).__name__}. Put one of the same class there, or shard the model after that."
                )
            if not extends(local):
                check_class(where, now)
            entry.parameter, changed = now, True
            now.__dict__[OURS] = True
            for module, name in entry.holders:
                put(module, name, now)
        if changed:
            self._lay_out([entry for flat in self.flats for entry in flat.entries])

    def _spec(self, parameter: torch.Tensor, tp: TensorParallel | None, shard_dim: int) -> DTensorSpec:
        """The DTensor spec, as FSDP2 has it, except that a parameter that no plan names is ``Replicate`` along tp.
        FSDP2 leaves that axis out, so norms and foreach updates of both kinds together fail there."""
        shape = parameter.shape
        meta = TensorMeta(shape, contiguous_stride(shape), parameter.dtype)
        rows = Shard(shard_dim)
        beyond: tuple[Placement, ...] = ()
        if self.mesh.tp_mesh is not None:
            dim = tp.dim if tp is not None else None
            beyond = (Replicate() if dim is None else Shard(dim),)
            if dim == shard_dim and self.mesh.tp > 1:  # ranks divide the rows of one tp part
                rows = StridedShard(dim, split_factor=self.mesh.tp)
        first = () if self.device_mesh.ndim == 1 else (Replicate(),)
        return DTensorSpec(self.all_axes, (*first, rows, *beyond), tensor_meta=meta)

    def _shard(self, plain: nn.Parameter, holders: list[Holder], shard_dim: int) -> Entry:
        """Replaces the parameter in its modules by a DTensor of this rank's rows."""
        tp = tensor_parallel(holders[0][1], plain)
        spec = self._spec(plain, tp, shard_dim)
        entry = Entry(plain, holders, spec, tp, shard_dim)
        first, last = own_rows(entry.leaf, self.mesh.shard, self.mesh.shard_rank)
        with torch.no_grad():
            if extends(plain):
                local = rows_of(plain, self.mesh)
            else:
                local = local_part(plain).narrow(shard_dim, first, last - first)
                if not plain.is_meta:
                    local = local.to(self.mesh.device)
        # `blank` has no storage offset: see `part_of`.
        blank = DTensor(torch.empty(0, dtype=local.dtype, device=local.device), spec, requires_grad=False)
        made = nn.Parameter(blank, requires_grad=plain.requires_grad)
        made._local_tensor = local  # type: ignore[attr-defined]
        made.__dict__.update(plain.__dict__)
        made.__dict__[OURS] = True
        plain.__dict__[ENTRY] = weakref.ref(entry)
        for module, name in holders:
            put(module, name, made)
        self.replaced.append((weakref.ref(plain), made))
        entry.parameter = made
        return entry

    @torch.no_grad()
    def _lay_out(self, entries: Sequence[Entry]) -> None:
        """Makes new flat shards for these parameters. Their local tensors become views of the new flat shards.

        Raises ``ValueError`` where the old ones hold back gradients.
        """
        if any(flat.waits for flat in self.flats) or any(one.waits for one in self.extended):
            raise ValueError(
                f"Parameters of {', '.join(type(one).__name__ for one in self.modules)} were replaced or moved while "
                "gradients are held back (set_requires_gradient_sync(False)). Run a backward that synchronises first, "
                "or drop them: model.reset_iter_state()."
            )
        kinds: dict[tuple[torch.dtype, bool, torch.device, bool], list[Entry]] = {}
        for entry in entries:
            local = entry.parameter._local_tensor  # type: ignore[attr-defined]
            kind = (local.dtype, entry.parameter.requires_grad, local.device, entry.leaf.split)
            kinds.setdefault(kind, []).append(entry)
        for flat in self.flats:
            flat.current = False
        self.flats = []
        self.version += 1
        for (dtype, _, device, _), members in kinds.items():
            buffer = lay_out_by_rows("", "", [entry.leaf for entry in members], self.mesh.shard)
            tensor = torch.zeros(buffer.numel // self.mesh.shard, dtype=dtype, device=device)
            for entry, slot in zip(members, buffer.slots, strict=True):
                known = entry.spec.tensor_meta
                if known is None or (known.shape, known.dtype) != (entry.parameter.shape, entry.parameter.dtype):
                    entry.spec = self._spec(entry.parameter, entry.tp, entry.shard_dim)
                old = entry.parameter._local_tensor  # type: ignore[attr-defined]
                entry.part = buffer.part(slot, self.mesh.shard_rank, self.mesh.shard)
                entry.local = part_of(tensor, entry.part.offset, entry.part.end, old.shape)
                if not tensor.is_meta:
                    entry.local.copy_(old)
                entry.parameter._local_tensor = entry.local  # type: ignore[attr-defined]
            self.flats.append(FlatShard(self, tensor, buffer, members))
        for one in self.extended:
            entry, buffer = one.entry, one.buffer
            entry.spec, entry.local = self._spec(entry.parameter, None, 0), one.local
            entry.part = buffer.part(buffer.slots[0], self.mesh.shard_rank, self.mesh.shard)

    @torch.no_grad()
    def move(self, places: Mapping[FlatShard, torch.Tensor]) -> None:
        """Moves the flat shards into this memory, with their values."""
        moved = []
        for flat in self.flats:
            tensor = places[flat]
            if not tensor.is_meta:
                tensor.copy_(flat.tensor)
            flat.current = False
            moved.append(FlatShard(self, tensor, flat.buffer, flat.entries))
            for entry in flat.entries:
                assert entry.local is not None
                entry.local = part_of(tensor, entry.part.offset, entry.part.end, entry.local.shape)
                entry.parameter._local_tensor = entry.local  # type: ignore[attr-defined]
        self.flats = moved
        self.version += 1

    # What the user may call between calls of the model.

    @property
    def is_tied_outside(self) -> bool:
        """Whether a parameter is also one of a module outside of these."""
        inside = {part for module in self.modules for part in module.modules()}
        return any(holder not in inside for entry in self.entries for holder, _ in entry.holders)

    @torch.no_grad()
    def unshard(self) -> None:
        """Registers whole, plain parameters with the modules, in the compute dtype. Collective. A backward that would
        leave a gradient in one of them raises ``RuntimeError``, also after `reshard`."""
        if self.unsharded:
            return
        world = self.mesh.shard
        for flat in self.flats:
            dtype = self.precision.param_dtype
            cast = dtype is not None and flat.tensor.is_floating_point()
            full = gather_shards(flat.tensor.to(dtype) if cast else flat.tensor, self.mesh).view(world, -1)
            sizes = widths(flat.buffer, world)
            for entry, slot, size in zip(flat.entries, flat.buffer.slots, sizes, strict=True):
                values = whole(full[:, slot.offset : slot.offset + size], slot.leaf, world).clone()
                if entry.tp is not None and self.mesh.tp_mesh is not None:  # a DTensor along tp, as the plan made it
                    values = joined(values, entry.tp, self.mesh.tp_mesh)
                self._register(entry, values)
        for one in self.extended:
            self._register(one.entry, one.gathered())

    def _register(self, entry: Entry, values: torch.Tensor) -> None:
        """Registers a whole parameter with these values in the modules."""
        whole = nn.Parameter(values, entry.parameter.requires_grad)
        for module, name in entry.holders:
            put(module, name, whole)
        if whole.requires_grad:
            whole.register_post_accumulate_grad_hook(_lost)
        self.unsharded.append((whole, whole._version))

    def reshard(self) -> None:
        """Registers the sharded parameters again. Raises ``RuntimeError`` if a whole one was written or got a
        ``grad``."""
        held, self.unsharded = self.unsharded, []
        if not held:
            return
        for entry in self.entries:
            for module, name in entry.holders:
                put(module, name, entry.parameter)
        for made, version in held:
            if made._version != version or made.grad is not None:
                _lost(made)


def _lost(made: torch.Tensor) -> NoReturn:
    what = "written to" if made.grad is None else "given a gradient"
    raise RuntimeError(
        f"A parameter of shape {list(made.shape)} was {what} while it was unsharded, which would be lost: the sharded "
        "parameter is what is trained. Write to that one, after reshard(); to compute with gradients, call the module "
        "that fully_shard was called on, or fsdp_compiled.register_fsdp_forward_method."
    )
