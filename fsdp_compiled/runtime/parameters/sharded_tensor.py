"""A tensor of which each rank holds a contiguous range: a parameter, its gradient, a copy or an average of it.

`ShardedTensor` is the DTensor of a parameter, and of what is computed from it element by element. Other operators read
it whole (`sharded_operators`). ``isinstance(x, DTensor)`` holds because of its ``__class__``, and it has DTensor's
methods. It is not a subclass: then it could not take a parameter's place, and PyTorch's own operators on DTensors would
assume that each rank holds rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_compiled.runtime.checkpoint.chunks import chunks_of, place_of, wrapped
from fsdp_compiled.runtime.parameters.shard_layout import ShardPlace
from fsdp_compiled.torch_private.dtensor import is_dispatching

READ = "Take parameter.full_tensor(), on every rank, for all of its values, or parameter.to_local() for this rank's."
WRITE = "Write into it in place, parameter.copy_(...) under torch.no_grad()."
PICKLE = (
    "Save with sharded.save(folder) or torch.distributed.checkpoint, or sharded.full_state_dict(), which is the "
    "ordinary state_dict."
)


def refusing(what: str, cure: str) -> Callable[..., NoReturn]:
    """A method that refuses."""

    def method(self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{name_of(self)} is in shards since compile_sharded: `{what}` is not possible. {cure}")

    return method


def name_of(tensor: Any) -> str:
    """The parameter's name in the model, for messages."""
    values = getattr(tensor, "_sharded", None)
    return getattr(tensor, "_sharded_name", None) or (values.place.name if values else "This tensor")


class FlatShard(Placement):
    """Cut along a mesh axis by elements in memory order. A rank's stretch may begin at any element."""

    def __repr__(self) -> str:
        return "FlatShard()"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatShard)

    def __hash__(self) -> int:
        return hash(FlatShard)


@dataclass(frozen=True)
class Values:
    """Where a tensor's values are. ``flat``: this rank's values; None: they are live, in the shard.

    ``whole``: whether ``flat`` is the whole value, which every rank computed from the parameter at ``place``, or from
    it and others. ``base`` and ``replay``: for a view, what it views, and how to view that when it is whole.
    """

    place: ShardPlace
    flat: torch.Tensor | None = None
    whole: bool = False
    base: ShardedTensor | None = None
    replay: Callable[[torch.Tensor], torch.Tensor] | None = None


class ShardedTensor(torch.Tensor):
    """A tensor of which each rank has a stretch, or a view of one, or a result computed from the whole."""

    _sharded: Values

    def _class(self) -> type:
        return DTensor if "_sharded" in self.__dict__ and not is_dispatching() else type(self)

    # ``__class__`` is DTensor for callers. `swap_tensors` gets the class itself, for a tensor not in its place yet. So
    # does the dispatcher, which in torch 2.11 has its own code for DTensors, whatever `__torch_dispatch__` says.
    __class__ = property(_class, object.__dict__["__class__"].__set__)  # type: ignore[assignment]
    __torch_function__ = nn.Parameter.__torch_function__  # results have the type that operators say

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        from fsdp_compiled.runtime.parameters.sharded_operators import dispatch

        return dispatch(func, args, kwargs or {})

    @property
    def local(self) -> torch.Tensor:
        """This rank's values, 1-d; all values of a tensor that is whole."""
        return self._sharded.place.live if self._sharded.flat is None else self._sharded.flat

    # What a DTensor has.

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._sharded.place.layout.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        mesh = self.device_mesh
        if self._sharded.whole:
            return (Replicate(),) * mesh.ndim
        return tuple(self._along(name) for name in mesh.mesh_dim_names or (None,) * mesh.ndim)

    def _along(self, name: str | None) -> Placement:
        from fsdp_compiled.distributed.device_mesh import AXES

        axis = AXES.get(name or "shard", "shard")
        if axis == "tp":
            tp = self._sharded.place.leaf.tp
            return Replicate() if tp is None or tp.dim is None else Shard(tp.dim)
        cut = axis == "shard" and self._sharded.place.layout.plan.placement.parameter
        return FlatShard() if cut else Replicate()

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """All of its values, a copy. Collective."""
        from fsdp_compiled.runtime.parameters.sharded_operators import full

        return full(self)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's values: a stretch in memory order, 1-d, often empty; of a parameter, those that are trained."""
        return self.local

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> DTensor:
        """Whole on each rank. Collective. Raises ``NotImplementedError`` for other placements."""
        if placements is None or not all(isinstance(one, Replicate) for one in placements):
            raise NotImplementedError(
                f"{name_of(self)} cannot be redistributed as {placements}: it is cut by elements, {self.placements}. "
                "Give Replicate() for each axis of the mesh; or distribute_tensor(parameter.full_tensor(), ...)."
            )
        mesh = self.device_mesh
        return DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)

    data = property(lambda self: self.detach(), refusing(".data = ...", WRITE))  # PyTorch's is of its own DTensors

    # What `torch.distributed.checkpoint` asks for: rectangles of the whole.

    def __create_write_items__(self, fqn: str, _object: Any) -> Any:
        found = self._rectangles()
        return [] if found is None else found.__create_write_items__(fqn, self)

    def __create_chunk_list__(self) -> Any:
        found = self._rectangles()
        return [] if found is None else found.__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> Any:
        return self._rectangles().__get_tensor_shard__(index)

    def _rectangles(self) -> Any:
        if self._sharded.whole or self._sharded.replay is not None:
            raise NotImplementedError("A view of a parameter, or what was computed of one, cannot be saved by DCP.")
        place = self._sharded.place
        found = [*chunks_of(place.name, place.leaf, place_of(place.layout.mesh), place.part.first, self.local)]
        return wrapped(found) if found else None

    # What a DTensor has and this does not.

    numpy = refusing("numpy", READ)
    data_ptr = refusing("data_ptr", READ)
    storage = _typed_storage = untyped_storage = refusing("storage", READ)
    share_memory_ = refusing("share_memory_", READ)
    __dlpack__ = refusing("__dlpack__", READ)
    __reduce_ex__ = refusing("pickle", PICKLE)

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                made._is_param = True
            memo[id(self)] = made
        return memo[id(self)]

    def __repr__(self, **_kwargs: Any) -> str:
        kind = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"
        if self._sharded.whole:
            return f"DTensor({self._sharded.flat}, whole on each rank)"
        frozen = "" if self.requires_grad else ", no gradient"
        viewed = "a view of " if self._sharded.replay is not None else ""
        return f"DTensor({viewed}{name_of(self)}: {kind}{frozen}; here {self.local.numel()} of {self.numel()} elements)"


def sharded(
    values: Values,
    like: torch.Tensor,
    device: torch.device | None = None,
    kind: type[ShardedTensor] = ShardedTensor,
) -> ShardedTensor:
    """A tensor of these values, with the shape, strides and dtype of ``like``, and its device if none is given."""
    made = torch.Tensor._make_wrapper_subclass(
        kind, like.shape, like.stride(), dtype=like.dtype, device=device or like.device
    )
    made._sharded = values
    return made


def is_sharded(value: Any) -> bool:
    """Whether it is a `ShardedTensor`, whose ``__class__`` is DTensor."""
    return issubclass(type(value), ShardedTensor)
