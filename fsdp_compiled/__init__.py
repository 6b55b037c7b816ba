"""Fully sharded data parallelism as a compiler: the training step is one program that you can read."""

import fsdp_compiled.capture.cache_folder  # noqa: F401  before anything that imports Dynamo

# isort: split
from fsdp_compiled.api import compile_sharded
from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.sequence_attention import SequenceAttention, stretch
from fsdp_compiled.distributed.mesh import RankError
from fsdp_compiled.fully_shard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from fsdp_compiled.ir.form import ProgramError
from fsdp_compiled.ir.program import Port, Program
from fsdp_compiled.lower.bundle import BundleError, load_bundle
from fsdp_compiled.plan.plan import Plan
from fsdp_compiled.policy import LossScale, Policy
from fsdp_compiled.runtime.chunked_loss import chunked_cross_entropy
from fsdp_compiled.runtime.loop.loop_optimizer import CompiledOptimizer, compile_optimizer
from fsdp_compiled.runtime.sharded import Sharded
from fsdp_compiled.runtime.simulate import Estimate, simulate
from fsdp_compiled.runtime.state import State

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "CPUOffloadPolicy",
    "CaptureError",
    "CompiledOptimizer",
    "Estimate",
    "FSDPModule",
    "LossScale",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plan",
    "Policy",
    "Port",
    "Program",
    "ProgramError",
    "RankError",
    "SequenceAttention",
    "Sharded",
    "State",
    "UnshardHandle",
    "chunked_cross_entropy",
    "compile_optimizer",
    "compile_sharded",
    "fully_shard",
    "load_bundle",
    "register_fsdp_forward_method",
    "simulate",
    "stretch",
]
