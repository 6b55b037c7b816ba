"""``torch._dynamo``, and the tracing context of ``torch._guards``, in torch 2.11 to 2.14.

What each name is for, and what happens without it, is in the table of `names`. Where one is missing, a placeholder
stands here; who uses it asks `names.uses` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdp_compiled.torch_private.names import find

D, V = "torch._dynamo", "torch._dynamo.variables"
if TYPE_CHECKING:
    from torch._dynamo.variables import LazyVariableTracker as LazyVariableTracker
    from torch._guards import Guard as Guard
    from torch._guards import Source as Source
else:
    Guard, Source = find("torch._guards.Guard"), find("torch._guards.Source")
    LazyVariableTracker = find(f"{V}.LazyVariableTracker")

config: Any = find(f"{D}.config")
cache_entries = find(f"{D}.eval_frame._debug_get_cache_entry_list")
BackendCompilerFailed = find(f"{D}.exc.BackendCompilerFailed")
TensorifyScalarRestartAnalysis = find(f"{D}.exc.TensorifyScalarRestartAnalysis")
TorchDynamoException = find(f"{D}.exc.TorchDynamoException")
Unsupported, UserError = find(f"{D}.exc.Unsupported"), find(f"{D}.exc.UserError")
UserErrorType = find(f"{D}.exc.UserErrorType")
GuardBuilder = find(f"{D}.guards.GuardBuilder")
install_guard = find(f"{D}.guards.install_guard")
uninteresting_files = find(f"{D}.guards.uninteresting_files")
AttrSource = find(f"{D}.source.AttrSource")
ClosureSource, GetItemSource = find(f"{D}.source.ClosureSource"), find(f"{D}.source.GetItemSource")
LocalSource = find(f"{D}.source.LocalSource")
NNModuleSource = find(f"{D}.source.NNModuleSource")
is_from_global_source = find(f"{D}.source.is_from_global_source")
InstructionTranslator = find(f"{D}.symbolic_convert.InstructionTranslator")
TensorifyState = find(f"{D}.symbolic_convert.TensorifyState")
ConstantVariable, ConstDictVariable = find(f"{V}.ConstantVariable"), find(f"{V}.ConstDictVariable")
ListVariable, TensorVariable = find(f"{V}.ListVariable"), find(f"{V}.TensorVariable")
TupleVariable = find(f"{V}.TupleVariable")
UserDefinedObjectVariable = find(f"{V}.UserDefinedObjectVariable")
AttributeMutationExisting = find(f"{V}.base.AttributeMutationExisting")
AttributeMutationNew = find(f"{V}.base.AttributeMutationNew")
ValueMutationExisting = find(f"{V}.base.ValueMutationExisting")
ValueMutationNew = find(f"{V}.base.ValueMutationNew")
VariableTracker = find(f"{V}.base.VariableTracker")
make_dupe_guard, wrap_fx_proxy = find(f"{V}.builder.make_dupe_guard"), find(f"{V}.builder.wrap_fx_proxy")
UnspecializedNNModuleVariable = find(f"{V}.nn_module.UnspecializedNNModuleVariable")
ChainedSource = find("torch._guards.ChainedSource")
TracingContext, tracing = find("torch._guards.TracingContext"), find("torch._guards.tracing")
_closure_vars: Callable[[], dict[str, Any]] = find(f"{D}.guards._get_closure_vars")


def closure_vars() -> dict[str, Any]:
    """What the texts of guards call."""
    from fsdp_compiled.torch_private.names import uses

    return _closure_vars() if uses("names in guards") else {}
