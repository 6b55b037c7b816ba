"""Checks a `Policy`: each field by itself, then fields that exclude each other. Raises ``ValueError``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compiled.policy.local_steps import LossScale, OuterSGD, Rendezvous, is_number

if TYPE_CHECKING:
    from fsdp_compiled.policy.policy import Policy


def check(policy: Policy, placements: Sequence[str]) -> None:
    """Checks all fields. ``placements``: the words that ``shard`` may be."""
    _check_words(policy, placements)
    _check_forms(policy)
    _check_numbers(policy)
    _check_precision(policy)
    _check_together(policy)


def _check_words(policy: Policy, placements: Sequence[str]) -> None:
    _one_of("shard", policy.shard, placements)
    _one_of("accumulate", policy.accumulate, ("shards", "full"))
    _one_of("offload", policy.offload, (False, True))
    _one_of("async_tp", policy.async_tp, (False, True))
    _one_of("wire", policy.wire, (None, "int8", "fp8"))
    _one_of("unrounded_gradients", policy.unrounded_gradients, (False, True))
    _one_of("recompute", policy.recompute, (None, "cheap", "unit", "auto"))
    _one_of("lower", policy.lower, ("inductor", "eager"))
    _one_of("weigh", policy.weigh, ("ranks", "rows"))
    for name in ("cuda_graph", "kernels", "copies"):
        value = getattr(policy, name)
        if not isinstance(value, bool) and value != "auto":
            raise ValueError(f'Policy.{name} is {value!r}; expected True, False or "auto".')


def _one_of(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise ValueError(f"Policy.{name} is {value!r}; expected one of {', '.join(map(repr, known))}.")


def _check_forms(policy: Policy) -> None:
    """Checks the forms of fields that hold several values."""
    if not (policy.tp is None or policy.tp == "auto") and not (
        isinstance(policy.tp, tuple)
        and policy.tp
        and all(isinstance(one, tuple) and len(one) == 2 and all(isinstance(t, str) for t in one) for one in policy.tp)
    ):
        raise ValueError(
            f'Policy.tp is {policy.tp!r}; expected "auto", None, or styles by patterns of module names: '
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'
        )
    if not (isinstance(policy.dynamic, bool) or policy.dynamic == "auto") and not (
        isinstance(policy.dynamic, tuple)
        and all(isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 for dim in policy.dynamic)
        and len(set(policy.dynamic)) == len(policy.dynamic)
    ):
        raise ValueError(
            f'Policy.dynamic is {policy.dynamic!r}; expected "auto", True, False, or dims counted from the front, '
            "such as (0, 1)."
        )
    if policy.without != "all" and not (
        isinstance(policy.without, tuple) and all(isinstance(name, str) for name in policy.without)
    ):
        raise ValueError(
            f'Policy.without is {policy.without!r}; expected a tuple of names of fusions, ("exchange",) for one, or '
            '"all".'
        )


def _check_numbers(policy: Policy) -> None:
    if policy.loss_rows is not None and not (
        isinstance(policy.loss_rows, int) and policy.loss_rows is not True and policy.loss_rows > 0
    ):
        raise ValueError(f"Policy.loss_rows is {policy.loss_rows!r}; expected a whole number, 1 or more, or None.")
    if not isinstance(policy.programs, int) or isinstance(policy.programs, bool) or policy.programs < 1:
        raise ValueError(f"Policy.programs is {policy.programs!r}; expected a whole number, 1 or more.")
    if not isinstance(policy.verify, int) or policy.verify < 0:
        raise ValueError(f"Policy.verify is {policy.verify!r}; expected True, False, or a whole number, 1 or more.")
    if policy.verify_difference not in ("raise", "recapture"):
        raise ValueError(f'Policy.verify_difference is {policy.verify_difference!r}; expected "raise" or "recapture".')
    for name, least in (("sync_every", 1), ("reshard_onto", 2)):
        value = getattr(policy, name)
        if value is not None and not (is_number(value) and isinstance(value, int) and value >= least):
            raise ValueError(f"Policy.{name} is {value!r}; expected a whole number, {least} or more, or None.")
    if not (policy.outer is None or isinstance(policy.outer, OuterSGD)):
        raise ValueError(f"Policy.outer is a {type(policy.outer).__name__}; expected an OuterSGD, or None.")
    if not (policy.rendezvous is None or isinstance(policy.rendezvous, Rendezvous)):
        raise ValueError(f"Policy.rendezvous is a {type(policy.rendezvous).__name__}; expected a Rendezvous, or None.")
    pair = isinstance(policy.network, tuple) and len(policy.network) == 2
    told: tuple[Any, ...] = policy.network if pair else (policy.network,)  # type: ignore[assignment]
    if policy.network not in (None, "measure") and not all(is_number(one) and 0 < one < math.inf for one in told):
        raise ValueError(
            f"Policy.network is {policy.network!r}; expected gigabits a second, as 1.0, or these and milliseconds of a "
            'message, as (1.0, 0.5), "measure", or None.'
        )
    for name in ("clip", "clip_value", "memory_gb"):
        value = getattr(policy, name)
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise ValueError(f"Policy.{name} is {value!r}; expected a positive number or None.")
    for name, least in (("prefetch", 0), ("limit", 1)):
        value = getattr(policy, name)
        if value != "auto" and not (is_number(value) and isinstance(value, int) and value >= least):
            raise ValueError(f'Policy.{name} is {value!r}; expected a whole number from {least} up, or "auto".')
    if policy.bucket_mb != "auto" and not (is_number(policy.bucket_mb) and 0 <= policy.bucket_mb < math.inf):
        raise ValueError(f'Policy.bucket_mb is {policy.bucket_mb!r}; expected MiB, 0 for one unit a block, or "auto".')


def _check_precision(policy: Policy) -> None:
    if not isinstance(policy.precision, MixedPrecisionPolicy):
        raise ValueError(
            f"Policy.precision is a {type(policy.precision).__name__}; expected "
            "torch.distributed.fsdp.MixedPrecisionPolicy."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy.precision, name)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"Policy.precision.{name} is {dtype}; expected a floating-point dtype.")
    scale = policy.loss_scale
    if not (scale is None or scale == "dynamic" or isinstance(scale, LossScale)) and not (
        isinstance(scale, int | float) and is_number(scale) and 0 < scale < math.inf
    ):
        raise ValueError(f'Policy.loss_scale is {scale!r}; expected None, "dynamic", a positive number or a LossScale.')


def _check_local_steps(policy: Policy) -> None:
    if policy.sync_every is None:
        if policy.outer is not None:
            raise ValueError(
                f"Policy.outer={policy.outer} moves weights every sync_every steps, which is None. Give it."
            )
        if policy.rendezvous is not None:
            raise ValueError(
                f"Policy.rendezvous={policy.rendezvous} is where sites meet every sync_every steps, which is None. "
                "Give it."
            )
        return
    outer = policy.exchange
    if outer.parts > policy.sync_every or outer.overlap >= policy.sync_every:
        raise ValueError(
            f"Policy.outer={outer} with sync_every={policy.sync_every}: expected at most as many parts as steps, and "
            "an overlap of fewer steps, so that a part has arrived before it leaves again."
        )
    if policy.rendezvous is not None and (outer.parts > 1 or outer.overlap):
        raise ValueError(
            f"Policy.outer={outer} with rendezvous={policy.rendezvous}: what travels beside the next steps cannot be "
            "sent again when a site leaves. Leave parts and overlap out."
        )
    _check_beside(
        policy, f"sync_every={policy.sync_every}",
        loss_scale="a step may be void on one site and not on another. Train in bfloat16",
        offload="the exchange does not work in host memory yet",
        weigh="sites count the same in an exchange, however many rows they had",
        verify_difference="sites may differ alone, and make programs together",
    )  # fmt: skip


def _check_wire(policy: Policy) -> None:
    if policy.wire is not None:
        yet = "it is not supported yet"
        _check_beside(policy, f"wire={policy.wire!r}", offload=yet, loss_scale=yet)


def _check_beside(policy: Policy, what: str, **fields: str) -> None:
    """Raises ``ValueError`` where one of these fields differs from its default. ``what``: the setting that it does not
    go with; ``fields``: the reason, by the field's name."""
    for name, why in fields.items():
        if (value := getattr(policy, name)) != type(policy).__dataclass_fields__[name].default:
            raise ValueError(f"Policy.{name} is {value!r} with {what}: {why}. Leave {name} out.")


def _check_together(policy: Policy) -> None:
    if policy.reshard_onto is not None and policy.shard != "zero3":
        raise ValueError(
            f"Policy.reshard_onto={policy.reshard_onto} says what becomes of parameters after forward, which under "
            f'shard={policy.shard!r} stay as they are. Give shard="zero3", or leave reshard_onto out.'
        )
    _check_local_steps(policy)
    _check_wire(policy)
    if policy.loss_rows is not None and policy.dynamic not in ("auto", False):
        raise ValueError(
            f"Policy.loss_rows={policy.loss_rows} makes so many slices as there are rows for, but under "
            f"dynamic={policy.dynamic!r} their number moves. Leave one of them out."
        )
    if isinstance(policy.prefetch, int) and isinstance(policy.limit, int) and policy.limit <= policy.prefetch:
        raise ValueError(
            f"Policy.limit={policy.limit} leaves no room for prefetch={policy.prefetch}: the unit in use is alive too. "
            f"Give limit={policy.prefetch + 1} or more, or a smaller prefetch."
        )
    if policy.clip is not None and policy.clip_value is not None:
        raise ValueError(
            f"Policy.clip={policy.clip!r} and Policy.clip_value={policy.clip_value!r} are both given; which comes "
            "first changes the result, so give one of them."
        )
    if policy.offload and policy.shard == "ddp":
        raise ValueError(
            'Policy.offload keeps a rank\'s shards in host memory, but under shard="ddp" there are none. Give '
            'shard="zero3", or leave offload out.'
        )
    if policy.offload and policy.copies is True:
        raise ValueError(
            "Policy.offload keeps shards in host memory, and Policy.copies=True a copy of them on the device. "
            'Leave copies at "auto", or take offload out.'
        )
    if policy.unrounded_gradients and (missing := _rounds(policy)):
        raise ValueError(
            "Policy.unrounded_gradients has matrix products in half precision write gradients in float32, but "
            f"{missing}. Leave unrounded_gradients out, or change that."
        )


def _rounds(policy: Policy) -> str:
    """The reason why no matrix product could write an unrounded gradient under this policy; empty if one can."""
    if policy.precision.param_dtype not in (torch.bfloat16, torch.float16):
        return f"precision.param_dtype is {policy.precision.param_dtype}, not torch.bfloat16 or torch.float16"
    if policy.precision.reduce_dtype != torch.float32:
        return f"precision.reduce_dtype is {policy.precision.reduce_dtype}, not torch.float32"
    if policy.lower != "inductor" or policy.kernels is False:
        return f'that is done under lower="inductor" with kernels, not lower={policy.lower!r}, kernels={policy.kernels}'
    if policy.without == "all" or {"flatten_gradients", "direct_gradients"} & set(policy.without):
        return f"Policy.without={policy.without!r} leaves out the fusions that do it"
    return ""
