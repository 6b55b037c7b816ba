"""accelerate, and what trains with it (the Trainer of transformers, TRL): their FSDP2 path with our `fully_shard`.

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ...))
    use_fully_shard(accelerator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`Accelerator._prepare_fsdp2` looks ``torch.distributed.fsdp.fully_shard`` up each time it is called. For as long as the
one of this accelerator runs, that name stands for ours. Before and after, and for all other accelerators, nothing is
changed. What accelerate does with a prepared model rests on `FSDPModule`, DTensors and
``torch.distributed.checkpoint.state_dict``, which are here what they are under FSDP2.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from fsdp_compiled.policy import Policy
from fsdp_compiled.runtime.fsdp.fully_shard import fully_shard

PREPARE = "_prepare_fsdp2"  # of Accelerator, since 1.6


def use_fully_shard(
    user: Any, *, policy: Policy | None = None, plugin: FullyShardedDataParallelPlugin | None = None
) -> None:
    """Makes this accelerator, or that of this Trainer, shard with `fsdp_compiled.fully_shard`.

    user
        An ``Accelerator``, or what has one as ``.accelerator``: a Trainer of transformers or TRL, before ``train()``.
    policy
        As `fully_shard` takes it.
    plugin
        Needed for an Accelerator on CPUs: accelerate has no FSDP there, and forgets the plugin that it was given. A
        Trainer's is made from its arguments.

    Raises ``ValueError`` where accelerate would not take its FSDP2 path, or has prepared a model already.
    """
    accelerator = user if isinstance(user, Accelerator) else getattr(user, "accelerator", None)
    if not isinstance(accelerator, Accelerator):
        raise ValueError(f"use_fully_shard expects an Accelerator, or a Trainer that has one; got {type(user)}.")
    if not hasattr(accelerator, PREPARE):
        raise ValueError("This release of accelerate has no FSDP2 that use_fully_shard knows. Install accelerate>=1.6.")
    if accelerator._optimizers:  # a model alone, as the reference of TRL's DPO, may have been prepared
        raise ValueError(
            "This Accelerator has prepared a model with its optimizer already. Call use_fully_shard before "
            "accelerator.prepare(), and before trainer.train()."
        )
    _enable_on_cpus(accelerator, user, plugin)
    if not getattr(accelerator, "is_fsdp2", False):
        raise ValueError(
            "This Accelerator does not use FSDP2, which use_fully_shard stands in for. Pass "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2); to a Trainer, fsdp= and "
            "fsdp_config={'version': 2}; and start it on two processes or more."
        )
    prepare = getattr(accelerator, PREPARE)

    @functools.wraps(prepare)
    def prepare_compiled(*args: Any) -> Any:
        with _in_the_place_of_theirs(policy):
            return prepare(*args)

    setattr(accelerator, PREPARE, prepare_compiled)
    _trace_whole(user)


def _enable_on_cpus(accelerator: Any, user: Any, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Turns on CPUs what accelerate calls FSDP, which it does by itself on all other devices."""
    state = accelerator.state
    if accelerator.device.type != "cpu" or accelerator.num_processes == 1 or getattr(state, "fsdp_plugin", None):
        return
    given = getattr(getattr(user, "args", None), "fsdp_plugin_args", None)
    if plugin is None and given is not None:
        plugin = FullyShardedDataParallelPlugin(**given)
    if plugin is None:
        raise ValueError(
            "accelerate has no FSDP on CPUs, and forgets the fsdp_plugin that it was given there. Pass it here too: "
            "use_fully_shard(accelerator, plugin=plugin)."
        )
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as AcceleratorState's own end does
    if hasattr(user, "is_fsdp_enabled"):
        user.is_fsdp_enabled = True


def _trace_whole(trainer: Any) -> None:
    """Lets Dynamo take the head of TRL's losses as one operation, which AOTAutograd traces into.

    It writes to a tile of a tensor with ``out=``, which Dynamo refuses. How that class is traced is all that changes,
    in this process and from here on.
    """
    if not any(one.__module__.startswith("trl.") for one in type(trainer).__mro__):
        return
    head = getattr(sys.modules.get("trl.trainer.utils"), "_ChunkedLogProbFunction", None)
    if head is not None:
        torch.compiler.allow_in_graph(head)


@contextmanager
def _in_the_place_of_theirs(policy: Policy | None) -> Iterator[None]:
    """Inside, ``from torch.distributed.fsdp import fully_shard`` imports ours."""
    theirs = torch.distributed.fsdp.fully_shard
    torch.distributed.fsdp.fully_shard = functools.partial(fully_shard, policy=policy)
    try:
        yield
    finally:
        torch.distributed.fsdp.fully_shard = theirs


__all__ = ["use_fully_shard"]
