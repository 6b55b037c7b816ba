"""Fully sharded data parallelism as a compiler: the training step is one program that you can read."""

from fsdp_compiled.api import compile_sharded
from fsdp_compiled.check import ProgramError
from fsdp_compiled.joint import CaptureError
from fsdp_compiled.mesh import RankError
from fsdp_compiled.plan import Plan
from fsdp_compiled.policy import LossScale, Policy
from fsdp_compiled.program import Port, Program
from fsdp_compiled.state import State
from fsdp_compiled.step import Sharded

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "LossScale",
    "Plan",
    "Policy",
    "Port",
    "Program",
    "ProgramError",
    "RankError",
    "Sharded",
    "State",
    "compile_sharded",
]
