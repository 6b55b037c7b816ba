"""``torch._functorch``: AOTAutograd, its settings, and what it says of each input and output of a joint graph.

The descriptors are there since torch 2.9, and are the same in 2.11 to 2.13.
"""

from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTOutput,
)
from torch._functorch.aot_autograd import aot_module_simplified

__all__ = [
    "BackwardTokenAOTInput",
    "BackwardTokenAOTOutput",
    "ForwardTokenAOTInput",
    "ForwardTokenAOTOutput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "PlainAOTOutput",
    "aot_module_simplified",
    "config",
]
