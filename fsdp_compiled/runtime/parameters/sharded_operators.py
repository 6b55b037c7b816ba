"""Operators on sharded parameters: what each computes on this rank.

    element by element   add, mul, lerp, clamp, copy_, their foreach kin      on this rank's stretches, no communication
    a view               p[0], p.T, p.view(-1)                                remembered: what is read is viewed whole,
                                                                              what is written goes into the shards
    else                 norm, sum, equal, cat, sort ...                      all ranks gather the whole, and compute
    random               normal_, rand_like                                   of the whole, rank 0's on every rank

So each result equals that of the same operator on the whole parameter. A plain tensor beside a parameter is taken to be
whole, and the same on every rank. If autograd would find this rank's own gradient through an operator, it raises an
error: a call of the model averages gradients over ranks, an operator does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_compiled.distributed.mesh import broadcast
from fsdp_compiled.runtime.parameters.shard_layout import ShardPlace
from fsdp_compiled.runtime.parameters.sharded_tensor import ShardedTensor, Values, is_sharded, name_of, sharded

# Operators that work element by element, or whose values do not matter, but that lack PyTorch's tag for it.
ALIKE = {
    "copy_", "fill_", "zero_", "clone", "_to_copy", "detach", "detach_", "alias", "empty_like", "zeros_like",
    "ones_like", "full_like", "masked_fill", "masked_fill_", "isclose", "lift_fresh", "copy",
}  # fmt: skip
REDUCING = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def is_elementwise(func: Any, name: str) -> bool:
    if name.startswith("_foreach_"):
        return not name.startswith(REDUCING)
    returns = [str(one.type) for one in func._schema.returns]  # ``equal`` has the tag, and returns a bool
    return returns == ["Tensor"] and (torch.Tag.pointwise in func.tags or name in ALIKE)


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def written_by(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> set[int]:
    """The ``id``s of the tensors that the operator writes."""
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else named.get(argument.name))
    return {id(one) for one in pytree.tree_leaves(found)}


Places = tuple[ShardPlace | None, list[ShardPlace | None]]


def in_one_place(args: Sequence[Any], named: Mapping[str, Any], written: set[int]) -> Places | None:
    """The places of an operator's arguments: of those by themselves, and of the n-th of each list.

    A row is all arguments, or the n-th of each list. None where a row does not hold only stretches in one place, whole
    tensors of its shape, and single numbers.
    """
    values = [*args, *named.values()]
    lists = [one for one in values if isinstance(one, list | tuple) and any(isinstance(x, torch.Tensor) for x in one)]
    single = [one for one in values if isinstance(one, torch.Tensor)]
    if not lists:
        return (_place_of(single), []) if _is_row(single, written) else None
    if any(one.dim() for one in single) or len({len(one) for one in lists}) > 1:
        return None
    rows = [[x for x in row if isinstance(x, torch.Tensor)] for row in zip(*lists, strict=True)]
    if not all(_is_row(row, written) for row in rows):
        return None
    return _place_of(single), [_place_of(row) for row in rows]


def _place_of(row: Sequence[torch.Tensor]) -> ShardPlace | None:
    return next((one._sharded.place for one in row if is_sharded(one) and not one._sharded.whole), None)  # type: ignore[attr-defined]


def _is_row(row: Sequence[torch.Tensor], written: set[int]) -> bool:
    cut = [one for one in row if is_sharded(one) and not one._sharded.whole]  # type: ignore[attr-defined]
    if not cut:
        return not any(is_sharded(one) for one in row)
    first = cut[0]._sharded.place  # type: ignore[attr-defined]
    if any(one._sharded.place.slot is not first.slot or one._sharded.place.layout is not first.layout for one in cut):  # type: ignore[attr-defined]
        return False
    others = [one for one in row if not any(one is x for x in cut)]
    if any(id(one) in written for one in others):  # writing to a whole tensor needs the whole value
        return False
    try:
        return torch.broadcast_shapes(first.shape, *(one.shape for one in others)) == first.shape
    except RuntimeError:
        return False


aten = torch.ops.aten
FORMS = ("memory_format", "layout")  # a 1-d stretch has only one form


def dispatch(func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """Runs an operator some of whose arguments are sharded tensors."""
    given = [one for one in pytree.tree_leaves((args, named)) if isinstance(one, torch.Tensor)]
    ours = [one for one in given if type(one) is not torch.Tensor and is_sharded(one)]
    written = written_by(func, args, named)
    _check_meaning(func, ours)
    _check_gradients(func, given, ours)
    name = func.overloadpacket.__name__
    if func in (aten.detach.default, aten.alias.default):
        return _alias(args[0])
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _whole(func, args, named, ours, written, agreed=True)
    local = is_elementwise(func, name) and all(one._sharded.replay is None for one in ours)
    if local and (places := in_one_place(args, named, written)) is not None:
        return _local(func, args, named, written, *places)
    if is_view(func):
        return _view(func, args, named)
    return _whole(func, args, named, ours, written)


def full(tensor: ShardedTensor) -> torch.Tensor:
    """All of its values, as a plain tensor of its own; differentiable. Collective."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _Full.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    with _meeting("full_tensor", [tensor]), torch.no_grad():
        return whole_of(tensor).clone(memory_format=torch.contiguous_format)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.place = tensor._sharded.place
        with torch.no_grad():
            return full(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> ShardedTensor:
        return wrapped(gradient, ctx.place)


def wrapped(value: torch.Tensor, place: ShardPlace) -> ShardedTensor:
    """A sharded tensor whose whole value every rank has computed."""
    return sharded(Values(place, value, whole=True), value)


def stretch(flat: torch.Tensor, place: ShardPlace) -> ShardedTensor:
    """A tensor like the parameter, of which this rank has these values."""
    return sharded(Values(place, flat), place.like(flat.dtype), flat.device)


def gradient_at(place: ShardPlace, flat: torch.Tensor) -> torch.Tensor:
    """One parameter's gradient, a view of the flat one: this rank's shard of it, or all of it."""
    if place.layout.whole:
        return place.leaf.in_shape(place.part.of(flat))
    if flat.numel() < place.buffer.numel or place.layout.mesh.shard == 1:
        return stretch(place.part.of(flat), place)
    if place.leaf.split:
        mesh, plan = place.layout.mesh, place.layout.plan
        return stretch(place.part.of(plan.own(flat, mesh.shard_rank, plan.placement.parameter)), place)
    return wrapped(place.leaf.in_shape(flat[place.slot.offset : place.slot.end]), place)


def _check_meaning(func: Any, ours: Sequence[ShardedTensor]) -> None:
    """Raises ``RuntimeError`` for operators that would act on a gathered copy only."""
    name = func.overloadpacket.__name__
    if "c10d" in func.namespace:
        raise RuntimeError(
            f"{name_of(ours[0])} is in shards since compile_sharded: a collective of one's own, `{name}`, is not "
            "possible. Parameters and means of gradients are the same for all ranks already; "
            "parameter.full_tensor() is an ordinary tensor."
        )
    if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
        raise RuntimeError(
            f"{name_of(ours[0])} is in shards since compile_sharded: `{name}` is not possible, which gives a tensor "
            "another shape. Take a view, or parameter.full_tensor()."
        )


def _check_gradients(func: Any, given: Sequence[torch.Tensor], ours: Sequence[ShardedTensor]) -> None:
    """Raises ``RuntimeError`` if a gradient would be this rank's only."""
    if not torch.is_grad_enabled() or not any(one.requires_grad and not one._sharded.whole for one in ours):
        return
    plain = [one for one in given if not is_sharded(one) and one.dim() and one.numel()]
    if plain and not is_view(func):
        name = func.overloadpacket.__name__
        raise RuntimeError(
            f"{getattr(ours[0], '_sharded_name', 'a parameter')} is in shards since compile_sharded: `{name}` with a "
            "plain tensor would give it this rank's own gradient. Call the model, which averages gradients over ranks; "
            "or compute under torch.no_grad(), or with parameter.detach()."
        )


# How it is computed.


def _alias(tensor: ShardedTensor) -> ShardedTensor:
    """Another tensor object of the same values."""
    return sharded(tensor._sharded, tensor)


def _local(
    func: Any, args: Sequence[Any], named: Mapping[str, Any], written: set[int], alone: ShardPlace | None,
    places: Sequence[ShardPlace | None],
) -> Any:  # fmt: skip
    """Runs the operator on this rank's stretches. ``alone``, ``places``: as `in_one_place` gives them."""

    def local(value: Any, place: ShardPlace | None) -> Any:
        if is_sharded(value) and not value._sharded.whole:
            return value.local
        if not isinstance(value, torch.Tensor):
            return value
        value = value._sharded.flat if is_sharded(value) else value
        if place is None or (not value.dim() and place.shape):  # a 0-d tensor is cut only beside a 0-d parameter
            return value
        return place.cut(value.expand(place.shape))

    def convert(value: Any) -> Any:
        if (
            isinstance(value, list | tuple)
            and len(value) == len(places)
            and any(isinstance(one, torch.Tensor) for one in value)
        ):
            return [local(one, place) for one, place in zip(value, places, strict=True)]
        return local(value, alone)

    own = [convert(value) for value in args]
    options = {name: convert(value) for name, value in named.items() if name not in FORMS}
    found = func(*own, **options)
    for one in pytree.tree_leaves((args, named)):
        if id(one) in written and is_sharded(one) and one._sharded.flat is None:
            one._sharded.place.written(func.overloadpacket.__name__)
    if found is None:
        return None
    back = {id(value): one for one, value in zip(args, own, strict=True) if isinstance(one, torch.Tensor)}
    if isinstance(found, list | tuple):
        return [one if place is None else stretch(one, place) for one, place in zip(found, places, strict=True)]
    if id(args[0]) in written:
        return back[id(own[0])]
    if named.get("out") is not None:
        return named["out"]
    assert alone is not None
    return stretch(found, alone)


def _view(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Makes views that remember what they view."""
    base = args[0]
    if base._sharded.whole:
        found = func(base._sharded.flat, *args[1:], **named)
        return pytree.tree_map_only(torch.Tensor, lambda one: wrapped(one, base._sharded.place), found)

    def replay(whole: torch.Tensor) -> Any:
        return func(whole, *args[1:], **named)

    empty = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    shown = replay(empty)
    under, before = (base, None) if base._sharded.replay is None else (base._sharded.base, base._sharded.replay)

    def made(index: int | None, like: torch.Tensor) -> ShardedTensor:
        def again(whole: torch.Tensor) -> torch.Tensor:
            found = replay(before(whole) if before is not None else whole)
            return found if index is None else found[index]  # type: ignore[no-any-return]

        return sharded(replace(base._sharded, base=under, replay=again), like, base.device)

    if isinstance(shown, torch.Tensor):
        return made(None, shown)
    return [made(index, like) for index, like in enumerate(shown)]


def _whole(
    func: Any, args: Sequence[Any], named: Mapping[str, Any], ours: Sequence[ShardedTensor], written: set[int],
    agreed: bool = False,
) -> Any:  # fmt: skip
    """Runs the operator on whole tensors, by all ranks together; ``agreed``: all ranks get rank 0's results."""
    wholes: dict[int, torch.Tensor] = {}  # by argument's ``id``, its whole value
    bases: dict[int, torch.Tensor] = {}  # by argument's ``id``, the whole tensor that it is a view of
    held: dict[int, torch.Tensor] = {}  # the same by place: two views of one parameter share it
    changed = {_where(_under(one)) for one in ours if id(one) in written and not one._sharded.whole}

    def whole(value: Any) -> Any:
        if not is_sharded(value):
            return value
        if id(value) not in wholes:
            under = _under(value)
            if _where(under) not in held:
                base = whole_of(under)
                is_own = base is under._sharded.flat and _where(under) in changed
                held[_where(under)] = base.clone() if is_own else base
            bases[id(value)] = base = held[_where(under)]
            wholes[id(value)] = value._sharded.replay(base) if value._sharded.replay is not None else base
        return wholes[id(value)]

    with _meeting(func.overloadpacket.__name__, ours, agreed):
        own, options = pytree.tree_map(whole, (list(args), dict(named)))
        found = func(*own, **options)
        results = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
        for one in results if agreed else ():
            broadcast(one, ours[0]._sharded.place.layout.mesh)  # rank 0's values on every rank
    for value in ours:
        if id(value) in written and not value._sharded.whole:
            under = _under(value)
            under.local.copy_(under._sharded.place.cut(bases[id(value)]))
            if under._sharded.flat is None:
                under._sharded.place.written(func.overloadpacket.__name__)
    back = {id(wholes[id(value)]): value for value in ours if id(value) in wholes}
    plain = any(
        isinstance(one, torch.Tensor) and not is_sharded(one) and one.dim() and id(one) not in written
        for one in pytree.tree_leaves((args, named))
    )

    def result(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in back:
            return back[id(value)]
        if plain or any(value is one for one in pytree.tree_leaves((own, options))):
            return value  # from a plain tensor, which may differ by rank; or an argument
        return wrapped(value, ours[0]._sharded.place)

    return pytree.tree_map(result, found)


def _where(tensor: ShardedTensor) -> int:
    """A key that is the same for tensors in one place."""
    return id(tensor._sharded.place if tensor._sharded.flat is None else tensor._sharded.flat)


def _under(tensor: ShardedTensor) -> ShardedTensor:
    """The tensor that a view views; a tensor that is no view is returned as it is."""
    base = tensor if tensor._sharded.replay is None else tensor._sharded.base
    assert base is not None
    return base


def whole_of(tensor: ShardedTensor) -> torch.Tensor:
    """The whole value; a tensor that is whole already is not gathered."""
    if tensor._sharded.whole:
        assert tensor._sharded.flat is not None
        return tensor._sharded.flat
    base = _under(tensor)
    value = base._sharded.place.gather(base.local)
    return value if tensor._sharded.replay is None else tensor._sharded.replay(value)


def _meeting(what: str, tensors: Sequence[ShardedTensor], agreed: bool = False) -> Any:
    """A meeting of all ranks to read these, if any of them is cut, or if ranks must agree on the result."""
    cut = [one for one in tensors if not one._sharded.whole]
    if not cut and not agreed:
        return torch.no_grad()
    layout = tensors[0]._sharded.place.layout
    names = ", ".join(dict.fromkeys(one._sharded.place.name for one in tensors[:3]))
    return layout.meeting(f"{what} of {names}")
