"""``torch._dynamo``, and the tracing context of ``torch._guards``: torch 2.11 to 2.13 have all of this in one form.

Capturing relies on: the settings (``config``), the errors of what cannot be traced, the backend that hands a graph to
AOTAutograd, the tracer itself with its record of mutated Python objects, the table of compiled code with its guards,
who builds guards (``CheckFunctionManager``) and times them
(``guard_building.profile_guard_manager``), the source of a number that is read out of a tensor, the record of those
that cannot stay unknown, and on ``variables.misc`` or ``variables.user_defined`` for the function that calls Python's
random numbers, ``misc`` and ``variables.tensor`` for what texts, tensors and their storages answer.
"""

from torch._dynamo import config, maybe_mark_dynamic
from torch._dynamo import guards as guard_building
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as cache_entries
from torch._dynamo.exc import (
    BackendCompilerFailed,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    Unsupported,
    UserError,
    UserErrorType,
)
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.guards import _get_closure_vars as closure_vars
from torch._dynamo.source import CallMethodItemSource
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._dynamo.variables import ConstantVariable, misc, user_defined
from torch._dynamo.variables import tensor as tensor_variables
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._guards import TracingContext, tracing

__all__ = [
    "AttributeMutationExisting",
    "BackendCompilerFailed",
    "CallMethodItemSource",
    "CheckFunctionManager",
    "ConstantVariable",
    "InstructionTranslator",
    "TensorifyScalarRestartAnalysis",
    "TensorifyState",
    "TorchDynamoException",
    "TracingContext",
    "Unsupported",
    "UserError",
    "UserErrorType",
    "ValueMutationExisting",
    "aot_autograd",
    "cache_entries",
    "closure_vars",
    "config",
    "guard_building",
    "maybe_mark_dynamic",
    "misc",
    "tensor_variables",
    "tracing",
    "user_defined",
]
