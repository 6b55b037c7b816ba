"""``torch._dynamo``, and the tracing context of ``torch._guards``: torch 2.11 to 2.13 have all of this in one form.

Capturing relies on: the settings (``config``), the errors of what cannot be traced, the tracer itself with its record
of mutated Python objects, the table of compiled code with its guards, who builds guards (``CheckFunctionManager``),
times them (``guard_building.profile_guard_manager``), notes that two names are of one object and wraps modules
(``variable_builder``), who makes the graph (``OutputGraph``), the source of a number that is read out of a tensor, the
record of those that cannot stay unknown, and on ``variables.misc`` or ``variables.user_defined`` for the function that
calls Python's random numbers, ``misc`` and ``variables.tensor`` for what texts, tensors and their storages answer.

Repeated blocks rely on what stands for modules, tensors, numbers and tuples while Dynamo traces, on sources and guards.
"""

from torch._dynamo import config, maybe_mark_dynamic
from torch._dynamo import guards as guard_building
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as cache_entries
from torch._dynamo.exc import (
    BackendCompilerFailed,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    Unsupported,
    UserError,
    UserErrorType,
)
from torch._dynamo.guards import CheckFunctionManager, GuardBuilder, GuardManager, install_guard, uninteresting_files
from torch._dynamo.guards import _get_closure_vars as closure_vars
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import (
    CallMethodItemSource,
    ClosureSource,
    DictGetItemSource,
    GetItemSource,
    LocalSource,
    NNModuleSource,
    is_from_global_source,
)
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase, TensorifyState
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    ListVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
    misc,
    user_defined,
)
from torch._dynamo.variables import builder as variable_builder
from torch._dynamo.variables import tensor as tensor_variables
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    AttributeMutationNew,
    ValueMutationExisting,
    ValueMutationNew,
)
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import CommonListMethodsVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._guards import ChainedSource, Guard, Source, TracingContext, tracing

__all__ = [
    "AttributeMutationExisting",
    "AttributeMutationNew",
    "BackendCompilerFailed",
    "CallMethodItemSource",
    "ChainedSource",
    "CheckFunctionManager",
    "ClosureSource",
    "CommonListMethodsVariable",
    "ConstDictVariable",
    "ConstantVariable",
    "DictGetItemSource",
    "GetItemSource",
    "Guard",
    "GuardBuilder",
    "GuardManager",
    "InstructionTranslator",
    "InstructionTranslatorBase",
    "LazyVariableTracker",
    "ListVariable",
    "LocalSource",
    "NNModuleSource",
    "OutputGraph",
    "Source",
    "TensorVariable",
    "TensorifyScalarRestartAnalysis",
    "TensorifyState",
    "TorchDynamoException",
    "TracingContext",
    "TupleVariable",
    "UnspecializedNNModuleVariable",
    "Unsupported",
    "UserDefinedObjectVariable",
    "UserError",
    "UserErrorType",
    "UserFunctionVariable",
    "ValueMutationExisting",
    "ValueMutationNew",
    "cache_entries",
    "closure_vars",
    "config",
    "guard_building",
    "install_guard",
    "is_from_global_source",
    "maybe_mark_dynamic",
    "misc",
    "tensor_variables",
    "tracing",
    "uninteresting_files",
    "user_defined",
    "variable_builder",
    "wrap_fx_proxy",
]
