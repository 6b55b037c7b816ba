"""Fully sharded data parallelism as a compiler: the training step is one program that you can read.

All of it, and PyTorch with it, is imported when a name is first asked for (PEP 562): a listing, or what starts ranks,
asks for none.
"""

import importlib
from typing import TYPE_CHECKING, Any

import fsdp_compiled.capture.cache_folder  # noqa: F401  before anything that imports Dynamo

if TYPE_CHECKING:
    from fsdp_compiled.api import compile_sharded as compile_sharded
    from fsdp_compiled.capture.aot import CaptureError as CaptureError
    from fsdp_compiled.capture.layers_across_ranks import SequenceAttention as SequenceAttention
    from fsdp_compiled.capture.layers_across_ranks import stretch as stretch
    from fsdp_compiled.distributed.mesh import RankError as RankError
    from fsdp_compiled.ir.form import ProgramError as ProgramError
    from fsdp_compiled.ir.program import Port as Port
    from fsdp_compiled.ir.program import Program as Program
    from fsdp_compiled.lower.bundle import BundleError as BundleError
    from fsdp_compiled.lower.bundle import load_bundle as load_bundle
    from fsdp_compiled.plan.hardware import Cluster as Cluster
    from fsdp_compiled.plan.plan import Plan as Plan
    from fsdp_compiled.policy import LossScale as LossScale
    from fsdp_compiled.policy import OuterSGD as OuterSGD
    from fsdp_compiled.policy import Policy as Policy
    from fsdp_compiled.policy import Rendezvous as Rendezvous
    from fsdp_compiled.runtime.chunked_loss import chunked_cross_entropy as chunked_cross_entropy
    from fsdp_compiled.runtime.fsdp.fully_shard import CPUOffloadPolicy as CPUOffloadPolicy
    from fsdp_compiled.runtime.fsdp.fully_shard import FSDPModule as FSDPModule
    from fsdp_compiled.runtime.fsdp.fully_shard import MixedPrecisionPolicy as MixedPrecisionPolicy
    from fsdp_compiled.runtime.fsdp.fully_shard import OffloadPolicy as OffloadPolicy
    from fsdp_compiled.runtime.fsdp.fully_shard import UnshardHandle as UnshardHandle
    from fsdp_compiled.runtime.fsdp.fully_shard import fully_shard as fully_shard
    from fsdp_compiled.runtime.fsdp.fully_shard import register_fsdp_forward_method as register_fsdp_forward_method
    from fsdp_compiled.runtime.sharded import Sharded as Sharded
    from fsdp_compiled.runtime.simulate import Estimate as Estimate
    from fsdp_compiled.runtime.simulate import simulate as simulate
    from fsdp_compiled.runtime.state import State as State

__version__ = "0.1.0"

_MODULES = {  # where each is; what a type checker reads above says the same
    "BundleError": "lower.bundle",
    "CPUOffloadPolicy": "runtime.fsdp.fully_shard",
    "CaptureError": "capture.aot",
    "Cluster": "plan.hardware",
    "Estimate": "runtime.simulate",
    "FSDPModule": "runtime.fsdp.fully_shard",
    "LossScale": "policy",
    "MixedPrecisionPolicy": "runtime.fsdp.fully_shard",
    "OffloadPolicy": "runtime.fsdp.fully_shard",
    "OuterSGD": "policy",
    "Plan": "plan.plan",
    "Policy": "policy",
    "Port": "ir.program",
    "Program": "ir.program",
    "ProgramError": "ir.form",
    "RankError": "distributed.mesh",
    "Rendezvous": "policy",
    "SequenceAttention": "capture.layers_across_ranks",
    "Sharded": "runtime.sharded",
    "State": "runtime.state",
    "UnshardHandle": "runtime.fsdp.fully_shard",
    "chunked_cross_entropy": "runtime.chunked_loss",
    "compile_sharded": "api",
    "fully_shard": "runtime.fsdp.fully_shard",
    "load_bundle": "lower.bundle",
    "register_fsdp_forward_method": "runtime.fsdp.fully_shard",
    "simulate": "runtime.simulate",
    "stretch": "capture.layers_across_ranks",
}

__all__ = list(_MODULES)

_REMOVED = {  # what to do instead
    "compile_optimizer": "Use the optimizer as it is, with fused=True where it has that; to clip, call "
    "torch.nn.utils.clip_grad_norm_ before its step.",
}


def __getattr__(name: str) -> Any:
    if name in _REMOVED:  # an AttributeError's text would not reach `from fsdp_compiled import name`
        raise ImportError(f"{name} was removed from {__name__}. {_REMOVED[name]}", name=__name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp_compiled.torch_private import names

    with names.supported():
        found = {one: getattr(importlib.import_module(f"{__name__}.{module}"), one) for one, module in _MODULES.items()}
    globals().update(found)  # all of them: Dynamo, which may ask next, sees what is there and nothing else
    return found[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
