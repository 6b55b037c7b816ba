"""The private names of PyTorch that this package uses, in one table: what for, and what happens without them.

*core*     Without it there is no product. `require` raises `UnsupportedTorch`, which names it.
*defence*  It finds what would be wrong in silence. Without it that is said once.
*speed*    It only makes something faster, or shows more of it. Without it that is left out, which is said once, with
           its cost.

What the table names is looked up by `find`, and by nothing else: a name that is gone is an error of nobody's import. A
model can be captured the *plain way*: with public calls and the core, and with no function of PyTorch replaced. That is
what runs on a release that is not in `TESTED`, where the environment has ``FSDP_COMPILED_PLAIN=1``, and where
`capture.plain_way` found that the fast way fails.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch

log = logging.getLogger("fsdp_compiled")
TESTED = ("2.11", "2.12", "2.13", "2.14")
RELEASE = ".".join(torch.__version__.split(".")[:2])
DYNAMO, VARIABLES = "torch._dynamo", "torch._dynamo.variables"


class UnsupportedTorch(RuntimeError):
    """The PyTorch that is installed has not what this package cannot do without."""


class Use(NamedTuple):
    """What some names are used for. In a name, "a|b" is the one that there is, "a?" one that some releases lack."""

    kind: Literal["core", "defence", "speed"]
    names: tuple[str, ...]
    without: str


TABLE: dict[str, Use] = {
    "a model's graph": Use("core", (
        f"{DYNAMO}.config", f"{DYNAMO}.eval_frame._debug_get_cache_entry_list", "torch._guards.TracingContext",
        "torch._guards.tracing", "torch._functorch.aot_autograd.aot_module_simplified",
        "torch._functorch._aot_autograd.descriptors", "torch._functorch.config",
    ), "no model can be captured"),
    "changes that forward makes": Use("core", (
        f"{DYNAMO}.symbolic_convert.InstructionTranslator", f"{VARIABLES}.base.AttributeMutationExisting",
        f"{VARIABLES}.base.ValueMutationExisting",
    ), "what a trace leaves on Python objects cannot be undone"),
    "programs": Use("core", (
        "torch._ops.OpOverload", "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode", "torch.utils._pytree", "torch.ops._c10d_functional",
    ), "programs cannot be written down"),
    "sharded parameters": Use("core", (
        "torch.distributed.tensor._dtensor_spec.DTensorSpec", "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "torch.distributed.tensor._shards_wrapper.LocalShardsWrapper",
        "torch.distributed.tensor.placement_types._StridedShard",
    ), "parameters cannot be DTensors"),
    "errors of a trace": Use("defence", (
        f"{DYNAMO}.exc.BackendCompilerFailed", f"{DYNAMO}.exc.TorchDynamoException", f"{DYNAMO}.exc.Unsupported",
        f"{DYNAMO}.exc.UserError", f"{DYNAMO}.exc.UserErrorType",
    ), "an error of a trace says less about the user's line and the cure"),
    "names in guards": Use("defence", (f"{DYNAMO}.guards._get_closure_vars",),
        "the order of a dictionary's keys and values that are equal, but not the same, may go unseen"),
    "unknown reads": Use("defence", (
        f"{VARIABLES}.tensor.TensorVariable.var_getattr|{VARIABLES}.tensor.TensorVariable.tp_getattro_impl",
        f"{VARIABLES}.tensor.UntypedStorageVariable.call_method", f"{VARIABLES}.ConstantVariable",
        f"{VARIABLES}.misc.StringFormatVariable.hash_impl|{VARIABLES}.misc.StringFormatVariable.is_python_hashable",
        f"{DYNAMO}.exc.UserError", f"{DYNAMO}.exc.UserErrorType",
    ), "a tensor's version, base, gradient or storage that forward asks for is not refused"),
    "one object": Use("defence", (
        f"{VARIABLES}.builder.make_dupe_guard", f"{VARIABLES}.functions.UserFunctionVariable.bind_args",
        f"{DYNAMO}.source.ClosureSource", f"{DYNAMO}.source.GetItemSource",
        f"{DYNAMO}.guards.GuardBuilder.DUPLICATE_INPUT", f"{DYNAMO}.guards.install_guard",
    ), "an object that forward reaches by two names may be replaced under one of them unseen"),
    "failed lookups": Use("defence", (
        f"{DYNAMO}.exc.ObservedException", f"{DYNAMO}.exc.ObservedKeyError", f"{DYNAMO}.exc.ObservedAttributeError",
    ), "a key or an attribute that forward looks up in vain, and catches that, may appear unseen"),
    "answers of Python": Use("defence", (
        f"{DYNAMO}.symbolic_convert.compare_op_handlers",
        f"{VARIABLES}.functions.WrapperUserFunctionVariable.call_function",
        f"{VARIABLES}.misc.LoggingLoggerVariable.call_method", f"{VARIABLES}.tensor.NumpyNdarrayVariable.python_type",
        f"{VARIABLES}.user_defined.UserDefinedObjectVariable.call_method",
        f"{VARIABLES}.builtin.vt_identity_compare?", f"{VARIABLES}.object_protocol.vt_identity_compare?",
        f"{DYNAMO}.source.AttrSource", f"{DYNAMO}.source.GetItemSource", f"{DYNAMO}.source.LocalSource",
        f"{VARIABLES}.base.VariableTracker", f"{VARIABLES}.ConstantVariable",
        f"{DYNAMO}.exc.UserError", f"{DYNAMO}.exc.UserErrorType",
    ), "two objects that become one, what functions under lru_cache keep, and classes of numbers of NumPy go unseen"),
    "keys of lists": Use("defence", (
        f"{VARIABLES}.lists.CommonListMethodsVariable.call_method", f"{VARIABLES}.ConstDictVariable",
    ), "keys of a dictionary that forward makes a list of may change unseen"),
    "random calls": Use("defence", (
        f"{VARIABLES}.misc.call_random_fn|{VARIABLES}.user_defined.call_random_fn",
        f"{DYNAMO}.exc.UserError", f"{DYNAMO}.exc.UserErrorType",
    ), "forward may draw from Python's random numbers, which stay those of the trace, without being refused"),
    "dropout of recurrent layers": Use("defence", ("torch._decomp.decompositions._rnn_helper",),
        "several recurrent layers with dropout are refused, and an LSTM before torch 2.13"),
    "causal masks": Use("defence", ("torch.nn.modules.transformer._detect_is_causal_mask",),
        "nn.Transformer with a mask and without is_causal is refused"),
    "numbers of tensors": Use("defence", (
        f"{DYNAMO}.exc.TensorifyScalarRestartAnalysis", f"{DYNAMO}.symbolic_convert.TensorifyState",
    ), "numbers that are read out of closed-over tensors are refused"),
    "unused draws": Use("defence", ("torch._inductor.config",),
        "random numbers that forward draws, and that nothing uses, are not drawn: later ones are others"),
    "operators on parameters in shards": Use("defence", (
        "torch._C.DispatchKey", "torch._C._dispatch_tls_is_dispatch_key_excluded",
    ), "torch 2.11 takes a parameter in shards for a DTensor of its own, and fails on operators outside of a step"),
    "backward by parts": Use("defence", ("torch._C._will_engine_execute_node",),
        "gradients pass through autograd one by one, and set_requires_gradient_sync(False) reduces them all the same"),
    "backward under a mode": Use("defence", ("torch.autograd.Variable._execution_engine",),
        "Policy.verify does not compare gradients and updates"),
    "hooks of parameters": Use("defence", ("torch.Tensor._post_accumulate_grad_hooks",),
        "a hook that is called after a parameter's gradient is not seen, and not called"),
    "loss on parts of the logits": Use("defence", (
        "torch.distributed.tensor.parallel.loss",
        "torch.distributed.tensor.parallel.loss._disable_custom_loss_ops",
        "torch.distributed.tensor.parallel.loss._enable_custom_loss_ops",
        "torch.distributed.tensor.parallel.loss._nll_loss_backward_handler",
        "torch.distributed.tensor.parallel.loss.customized_loss_ops",
        "torch.distributed.tensor.DTensor._op_dispatcher",
    ), "logits that are cut by classes are gathered for the loss, unless PyTorch's loss_parallel() is around it"),
    "sites that come and go": Use("defence", (
        "torch.distributed.distributed_c10d._register_process_group",
        "torch.distributed.distributed_c10d._unregister_process_group",
    ), "Policy.rendezvous is refused"),
    "modes": Use("defence", (
        "torch._C._is_any_autocast_enabled", "torch._C._len_torch_function_stack",
        "torch._C._pop_torch_function_stack", "torch._C._push_on_torch_function_stack",
        "torch._C._len_torch_dispatch_stack", "torch._C._autograd._top_saved_tensors_default_hooks",
        "torch._C._get_tracing_state", "torch._C._autocast_supported_devices",
        "torch._C._functorch.peek_interpreter_stack",
        "torch.overrides._get_current_function_mode_stack", "torch.utils._device.DeviceContext", "torch.utils._device",
        "torch.utils._mode_utils.no_dispatch", "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    ), "a mode around a call may go unseen"),
    "settings": Use("defence", tuple(f"torch._C.{name}" for name in (
        "_get_cublas_allow_bf16_reduced_precision_reduction", "_get_cublas_allow_fp16_accumulation",
        "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cudnn_benchmark", "_get_cudnn_deterministic",
        "_get_cudnn_enabled", "_get_cudnn_sdp_enabled", "_get_deterministic_algorithms",
        "_get_deterministic_algorithms_warn_only", "_get_deterministic_fill_uninitialized_memory",
        "_get_flash_sdp_enabled", "_get_fp32_precision_getter", "_get_math_sdp_allow_fp16_bf16_reduction",
        "_get_math_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_mkldnn_deterministic", "_get_mkldnn_enabled",
        "_get_sdp_priority_order",
    )), "a setting of PyTorch's that changes between two calls may go unseen"),
    "nodes' names": Use("defence", ("torch.fx.Graph._graph_namespace?",),
        "what is printed of a stage may number values otherwise than the program that runs"),
    "calls below autograd": Use("speed", ("torch._C._AutoDispatchBelowAutograd", "torch._C._set_grad_enabled"),
        "each operator of a step passes through autograd's dispatch: some 1 us each"),
    "graphs' pools": Use("speed", (
        "torch._C._cuda_beginAllocateCurrentThreadToPool", "torch._C._cuda_endAllocateToPool",
        "torch._C._cuda_releasePool",
    ), "steps run without CUDA graphs"),
    "optimizers' traced form": Use("speed", ("torch.compiler._is_compiling_flag",),
        "updates of optimizers that keep a form for compilers run outside of the step's program"),
    "optimizers' foreach calls on DTensors": Use("speed", ("torch.distributed.tensor.DTensor._op_dispatcher",),
        "an optimizer's update passes through DTensor's rules tensor by tensor"),
    "moving sizes": Use("speed", (f"{DYNAMO}.maybe_mark_dynamic",), "each size of a batch has a program of its own"),
    "equal blocks": Use("speed", (
        f"{DYNAMO}.guards.CheckFunctionManager.build_guards", f"{DYNAMO}.guards.GuardBuilder",
        f"{DYNAMO}.guards.uninteresting_files",
        f"{DYNAMO}.source.LocalSource", f"{DYNAMO}.source.NNModuleSource", f"{DYNAMO}.source.is_from_global_source",
        f"{VARIABLES}.ConstantVariable", f"{VARIABLES}.ConstDictVariable",
        f"{VARIABLES}.LazyVariableTracker", f"{VARIABLES}.ListVariable", f"{VARIABLES}.TensorVariable",
        f"{VARIABLES}.TupleVariable", f"{VARIABLES}.UserDefinedObjectVariable",
        f"{VARIABLES}.base.AttributeMutationNew", f"{VARIABLES}.base.ValueMutationNew",
        f"{VARIABLES}.builder.wrap_fx_proxy",
        f"{VARIABLES}.nn_module.UnspecializedNNModuleVariable.call_function",
        f"{VARIABLES}.nn_module.UnspecializedNNModuleVariable.call_method",
        "torch._guards.ChainedSource", "torch._guards.Guard", "torch._guards.Source",
        "torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast",
    ), "each of a model's equal blocks is traced by itself: some 30 ms a block at the first step"),
    "Inductor": Use("speed", tuple(f"torch._inductor.{name}" for name in (
        "async_compile.AsyncCompile", "codecache", "codecache.CacheBase", "codecache.cache_dir", "codecache.torch_key",
        "codegen.common.custom_backend_passes", "config", "cpu_vec_isa.VecISA",
        "cpu_vec_isa._get_isa_dry_compile_fingerprint", "output_code.CompiledFxGraph",
        "standalone_compile", "standalone_compile.CacheCompiledArtifact", "standalone_compile.CompiledArtifact",
    )), "programs run as with Policy(lower='eager'), operator by operator, and nothing is kept on disk"),
    "artefacts for tlparse": Use("speed", ("torch._logging.trace_structured",),
        "programs are not in the log that TORCH_TRACE asks for"),
}  # fmt: skip

# What is done by the fast way alone.
FAST = (
    "names in guards", "unknown reads", "one object", "failed lookups", "answers of Python", "keys of lists",
    "random calls",
    "dropout of recurrent layers", "causal masks",
    "numbers of tensors", "loss on parts of the logits", "moving sizes", "equal blocks",
)  # fmt: skip
NAMES = {one for use in TABLE.values() for name in use.names for one in (name, *name.rstrip("?").split("|"))}
ABSENT: set[str] = set()  # names that `find` is to miss; tests fill it before anything is looked up
_found: dict[str, Any] = {}
_left_out: dict[str, str] = {}  # uses, and a name that each lacks
_plainly: list[str] = []  # why models are captured the plain way, beyond what the environment says


def find(name: str) -> Any:
    """What this dotted name stands for ("a|b": the first that there is); a placeholder where there is none.

    The placeholder is a class of which nothing is an instance. To call it, or to ask it for anything, raises
    `UnsupportedTorch`.
    """
    if name not in _found:
        if name not in NAMES and not any(one.startswith(f"{name}.") for one in NAMES):  # or a module of such names
            raise KeyError(f"{name} is not in the table")
        _found[name] = next(filter(lambda one: one is not None, map(_look_up, name.rstrip("?").split("|"))), None)
        if _found[name] is None:
            bases = (Exception,) if ".exc." in name else ()  # `except` takes nothing else
            _found[name] = _Missing(name.rpartition(".")[2], bases, {"_said": name})
    return _found[name]


def find_in(own: str, *owners: str) -> Any:
    """What the table has under this last part of a name, once in these packages: a module's ``__getattr__``."""
    names = [name for name in NAMES if name.endswith(f".{own}") and name.startswith(owners) and "|" not in name]
    if len(names) != 1:
        raise AttributeError(f"{len(names)} names in the table are {own} of {' or '.join(owners)}; expected one")
    return find(names[0])


def has(name: str) -> bool:
    return not isinstance(find(name), _Missing)


def attribute(name: str) -> tuple[Any, str]:
    """The owner of a name that is to be replaced for a while, and what it is called there."""
    there = next(one for one in name.rstrip("?").split("|") if _look_up(one) is not None)
    owner, _, own = there.rpartition(".")
    return _look_up(owner), own


def uses(use: str) -> bool:
    """Whether this is to be done while a model is captured: its names are there, and it is not the plain way."""
    assert use in FAST, use
    return not plain() and there(use)


@contextlib.contextmanager
def replaced(use: str, *others: tuple[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, if a capture `uses` this, other functions are called on this thread in the place of PyTorch's.

    ``others``: names of functions of PyTorch's, each with the one to call: with PyTorch's, then with the arguments.
    """
    with contextlib.ExitStack() as stack:
        for name, other in others if uses(use) else ():
            owner, own = attribute(name)
            stack.enter_context(mock.patch.object(owner, own, on_this_thread(getattr(owner, own), other)))
        yield


@functools.cache
def substitute(function: Callable[..., Any], other: Callable[..., Any]) -> Any:
    """From now on Dynamo traces the other function in the place of this one, in the whole process."""
    return torch.compiler.substitute_in_graph(function, skip_signature_check=True)(other)


def on_this_thread(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the other function on the thread that is running now, with this one and the arguments; on others this
    one."""
    thread = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return other(function, *args, **kwargs) if threading.get_ident() == thread else function(*args, **kwargs)

    return either


def there(use: str) -> bool:
    """Whether all of its names are there. Which are not is said once."""
    if use not in _left_out and (gone := missing(use)):
        _left_out[use] = gone[0]
        log.warning("PyTorch %s has no %s. So %s.", torch.__version__, " and no ".join(gone), TABLE[use].without)
    return use not in _left_out


def broken(use: str, name: str, error: Exception) -> None:
    """Said once: this name is there, and is not what it was."""
    if use not in _left_out:
        _left_out[use] = name
        log.warning(
            "In PyTorch %s %s is not what it was (%s: %s). So %s.",
            torch.__version__, name, type(error).__name__, error, TABLE[use].without,
        )  # fmt: skip


def missing(use: str) -> list[str]:
    return [name for name in TABLE[use].names if not name.endswith("?") and not has(name)]


def plain() -> bool:
    """Whether models are captured the plain way."""
    return bool(_plainly) or RELEASE not in TESTED or os.environ.get("FSDP_COMPILED_PLAIN", "0") not in ("", "0")


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Inside, models are captured the plain way."""
    _plainly.append("")
    try:
        yield
    finally:
        _plainly.pop()


def stay_plain(why: str) -> None:
    """From here on models are captured the plain way. Said once, with what it means."""
    if not any(_plainly):
        lost = "; ".join(TABLE[use].without for use in FAST)
        log.warning("PyTorch %s: models are captured the plain way, since %s. So %s.", torch.__version__, why, lost)
    _plainly.append(why)


def require() -> None:
    """Raises `UnsupportedTorch` where something of the core is missing, and says what else is."""
    for use, (kind, _, without) in TABLE.items():
        if kind == "core" and (gone := missing(use)):
            raise unsupported(f"it has no {gone[0]}, so that {without}")
        there(use)


@contextlib.contextmanager
def supported() -> Iterator[None]:
    """`require`; inside, an import of PyTorch's that fails raises `UnsupportedTorch` too."""
    require()
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise unsupported(str(error)) from error


def unsupported(why: str) -> UnsupportedTorch:
    return UnsupportedTorch(
        f"PyTorch {torch.__version__} cannot be used: {why}. Tested are {', '.join(TESTED[:-1])} and {TESTED[-1]}. "
        f'Install one of these (pip install "torch=={TESTED[-1]}.*"), or a newer fsdp_compiled.'
    )


def _look_up(name: str) -> Any:
    if name in ABSENT:
        return None
    owner, _, own = name.rpartition(".")
    try:
        parent = importlib.import_module(owner)
    except ImportError:
        parent = _look_up(owner)
    try:
        return getattr(parent, own)
    except AttributeError:
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


class _Missing(type):
    def __getattr__(cls, own: str) -> Any:
        if own.startswith("__"):
            raise AttributeError(own)
        raise unsupported(f"it has no {cls.__dict__['_said']}")

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise unsupported(f"it has no {cls.__dict__['_said']}")
