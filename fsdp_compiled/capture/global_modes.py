"""The PyTorch modes that are on around a call: they decide what the same code computes.

    with torch.autocast("cpu", torch.bfloat16):     key and label of the program: under autocast(cpu, bfloat16)
        sharded.step(*batch)
                forward is traced     under them           `GlobalModes.entered`
                backward is traced    without autocast     as PyTorch recommends: `loss.backward()` after the block
                all else              under none           `outside_modes`: passes, Inductor, optimizer rules, each run

A program is a function of the model, the batch and these modes (`GlobalModes`). Some modes would have to see operators
of each call, which a call that is traced once cannot show them: `check` refuses these by name.

*None* means: autocast, inference mode, the default device and the user's dispatch modes are off. The default dtype and
the choice of kernels stay, since operators read them when they run. They are part of the program's key, so they are the
same then as when the program was made.

This is the only file that uses PyTorch's stacks of modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad
from torch.backends import mha
from torch.nn import functional
from torch.nn.modules import module

from fsdp_compiled.torch_private.modes import (
    DEVICES,
    DeviceContext,
    any_autocast,
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    function_modes,
    pop_function_mode,
    push_function_mode,
    saved_tensors_hooks,
    tracing_state,
    transform,
    without_modes,
)
from fsdp_compiled.torch_private.modes import device as _device
from fsdp_compiled.torch_private.names import broken, find, has

# The settings that choose operators, kernels and rounding: a label, the getter in ``torch._C``, its arguments, and the
# default. Every call reads them, so all getters are in C.
GETTERS: tuple[tuple[str, str, tuple[str, ...], Any], ...] = (
    ("deterministic algorithms", "_get_deterministic_algorithms", (), False),
    ("deterministic warn_only", "_get_deterministic_algorithms_warn_only", (), False),
    ("deterministic fill", "_get_deterministic_fill_uninitialized_memory", (), True),
    ("flash attention", "_get_flash_sdp_enabled", (), True),
    ("memory-efficient attention", "_get_mem_efficient_sdp_enabled", (), True),
    ("math attention", "_get_math_sdp_enabled", (), True),
    ("cuDNN attention", "_get_cudnn_sdp_enabled", (), True),
    ("attention reduced in half", "_get_math_sdp_allow_fp16_bf16_reduction", (), False),
    ("attention order", "_get_sdp_priority_order", (), None),  # None: as it is now
    ("cuBLAS fp16 reduction", "_get_cublas_allow_fp16_reduced_precision_reduction", (), True),
    ("cuBLAS bf16 reduction", "_get_cublas_allow_bf16_reduced_precision_reduction", (), True),
    ("cuBLAS fp16 accumulation", "_get_cublas_allow_fp16_accumulation", (), False),
    ("cuDNN", "_get_cudnn_enabled", (), True),
    ("cuDNN deterministic", "_get_cudnn_deterministic", (), False),
    ("cuDNN benchmark", "_get_cudnn_benchmark", (), False),
    ("mkldnn", "_get_mkldnn_enabled", (), True),
    ("mkldnn deterministic", "_get_mkldnn_deterministic", (), False),
    ("fp32 products on cuda", "_get_fp32_precision_getter", ("cuda", "matmul"), "none"),
    ("fp32 convolutions on cuda", "_get_fp32_precision_getter", ("cuda", "conv"), "tf32"),
    ("fp32 recurrences on cuda", "_get_fp32_precision_getter", ("cuda", "rnn"), "tf32"),
    ("fp32 products on mkldnn", "_get_fp32_precision_getter", ("mkldnn", "matmul"), "none"),
    ("fp32 convolutions on mkldnn", "_get_fp32_precision_getter", ("mkldnn", "conv"), "none"),
    ("fp32 recurrences on mkldnn", "_get_fp32_precision_getter", ("mkldnn", "rnn"), "none"),
)


def _settings() -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Each label, with what reads it and the default. A getter that this PyTorch lacks, or that takes other arguments,
    is left out, which the table of names says once."""
    for label, own, given, usual in GETTERS:
        if not has(name := f"torch._C.{own}"):
            continue
        getter = find(name)
        read: Callable[..., Any] = partial(getter, *given) if given else getter
        try:
            value = read()
        except Exception as error:
            broken("settings", name, error)
            continue
        if isinstance(value, list):  # which no key can have
            read, value = (lambda getter=getter: tuple(getter())), tuple(value)
        yield label, read, value if usual is None else usual
    yield "attention fast path", mha.get_fastpath_enabled, True


SETTINGS = list(_settings())
READ = tuple(read for _, read, _ in SETTINGS)
F = TypeVar("F", bound=Callable[..., Any])
NOTHING: AbstractContextManager[None] = nullcontext()


class GlobalModes(NamedTuple):
    """The modes around a call that its program depends on. Calls under equal modes share a program."""

    autocast: tuple[tuple[str, torch.dtype], ...]  # by type of device, where it is on
    dtype: torch.dtype
    device: torch.device | None
    settings: tuple[Any, ...]  # of `SETTINGS`

    def __str__(self) -> str:
        """The modes that differ from PyTorch's defaults, each after a comma; empty if none does."""
        found = [f"under autocast({name}, {str(dtype)[6:]})" for name, dtype in self.autocast]
        found += [f"default dtype {str(self.dtype)[6:]}"] * (self.dtype is not torch.float32)
        found += [f"default device {self.device}"] * (self.device is not None)
        entries = zip(SETTINGS, self.settings, strict=True)
        found += [f"{name} {value}" for (name, _, usual), value in entries if value not in (usual, (usual, usual))]
        return "".join(f", {text}" for text in found)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, autocast, default dtype and default device are these. The settings are taken as they are."""
        dtype = torch.get_default_dtype()
        cached = torch.is_autocast_cache_enabled()
        device = nullcontext() if self.device is None else self.device
        with outside_modes(), device:
            torch.set_autocast_cache_enabled(False)  # it would hold tensors of the trace
            torch.set_default_dtype(self.dtype)
            _set_autocast(self.autocast, True)
            try:
                yield
            finally:
                _set_autocast(self.autocast, False)
                torch.set_default_dtype(dtype)
                torch.set_autocast_cache_enabled(cached)


def now() -> GlobalModes:
    """The modes as they are here and now; takes 3 µs, at every call."""
    return GlobalModes(
        tuple(_autocast()) if any_autocast() else (),
        torch.get_default_dtype(),
        torch.get_default_device() if count_function_modes() else None,
        tuple([read() for read in READ]),
    )


def outside_modes(watched: bool = False) -> AbstractContextManager[None]:
    """Inside, none of the caller's modes is on. ``watched``: dispatch modes stay on and go on seeing operators."""
    modes = count_dispatch_modes() if not watched else 0
    if modes or any_autocast() or count_function_modes() or torch.is_inference_mode_enabled():
        return _outside_modes(bool(modes))
    return NOTHING


@contextmanager
def _outside_modes(dispatch: bool) -> Iterator[None]:
    autocast = list(_autocast())
    hooks = _without_trackers() if dispatch else []
    functions = [pop_function_mode() for _ in range(count_function_modes())]
    device, _device.CURRENT_DEVICE = _device.CURRENT_DEVICE, None
    _set_autocast(autocast, False)
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING
    try:
        with inference, without_modes() if dispatch else NOTHING:
            yield
    finally:
        _set_autocast(autocast, True)
        _device.CURRENT_DEVICE = device
        for mode in reversed(functions):
            push_function_mode(mode)
        for place, all_of_them in hooks:
            place.clear()
            place.update(all_of_them)


def is_tracker(hook: Any) -> bool:
    """Whether a global module hook is PyTorch's own: a dispatch mode follows the modules with it."""
    owner = getattr(hook, "__self__", None)
    return type(owner).__module__.partition(".")[0] == "torch" and not isinstance(owner, module.Module)


def _without_trackers() -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Removes the hooks with which dispatch modes (FlopCounterMode, CommDebugMode) follow modules. Returns the former
    contents of each table."""
    found = []
    for place in (module._global_forward_pre_hooks, module._global_forward_hooks, module._global_backward_pre_hooks):
        found.append((place, dict(place)))
        for key, hook in found[-1][1].items():
            if is_tracker(hook):
                del place[key]
    return found


def _autocast() -> Iterator[tuple[str, torch.dtype]]:
    return ((name, torch.get_autocast_dtype(name)) for name in DEVICES if torch.is_autocast_enabled(name))


def _set_autocast(devices: Iterable[tuple[str, torch.dtype]], on: bool) -> None:
    """Turns autocast on or off, and leaves the counts and the cache of `torch.autocast` to the caller."""
    for name, dtype in devices:
        torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_enabled(name, on)


def check(call: str, trains: bool, seen: bool, saves: bool = False) -> None:
    """Raises ``ValueError`` for a mode that this call cannot honour; takes 1 µs.

    ``call``: its name, for the message. ``trains``: whether it differentiates. ``seen``: whether its operators run one
    by one, so that a dispatch mode sees them. ``saves``: whether what backward needs is kept by autograd.
    """
    if torch.is_inference_mode_enabled() and trains:
        raise ValueError(
            f"{call} inside torch.inference_mode(), which forbids gradients. Call it outside the block. For forward "
            "alone, call the Sharded object, sharded(*inputs): that works inside."
        )
    if count_function_modes():
        for mode in function_modes():
            if not isinstance(mode, DeviceContext):
                raise ValueError(
                    f"{call} inside {_name(mode)}, a TorchFunctionMode: the model's code is traced once, so the mode "
                    "would not see the calls of later steps. Enter it inside the loss, where it is traced with it, or "
                    "leave it around the call."
                )
    if count_dispatch_modes():
        _check_dispatch(call, seen)
    if trains and not saves and saved_tensors_hooks(True) is not None:
        raise ValueError(
            f"{call} inside hooks for saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu): a "
            "compiled step keeps its activations without autograd, so the hooks would not run. Call it outside; to "
            'keep less memory, Policy(recompute="unit"), or torch.utils.checkpoint inside the model.'
        )
    if trains and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise ValueError(
            f"{call} with torch.autograd.set_detect_anomaly(True): a compiled step has no backward of autograd's that "
            "could be checked for NaN. Turn it off around the call; to find where a NaN comes from, run the plain "
            'model under it, or the step under a TorchDispatchMode that checks results, with Policy(lower="eager").'
        )
    if "_context_parallel" in (getattr(functional.scaled_dot_product_attention, "__module__", None) or ""):
        raise ValueError(
            f"{call} inside PyTorch's context_parallel, whose attention looks for tensors of its own at every call and "
            "does not get into a program. Give ranks their stretches with fsdp_compiled.stretch, and let the model "
            "attend with fsdp_compiled.SequenceAttention (docs/context_parallel.md)."
        )
    check_transforms(call)
    if tracing_state() is not None:
        raise ValueError(f"{call} inside torch.jit.trace, which would keep the numbers of this call. Call it outside.")


def check_transforms(call: str) -> None:
    """Raises ``ValueError`` inside a transform of functions, which would have to see each operator."""
    if transform() is not None:
        raise ValueError(
            f"{call} inside a torch.func transform (grad, vmap, jvp): it has collectives and state, and cannot be "
            "transformed. Use the transform inside the loss, where it is traced, or call value_and_grad."
        )
    if forward_ad._current_level >= 0:
        raise ValueError(
            f"{call} inside torch.autograd.forward_ad.dual_level(): a compiled step has no derivative forward, and "
            "tangents would be lost. Call it outside, or use torch.func.jvp inside the loss, where it is traced."
        )


def _check_dispatch(call: str, seen: bool) -> None:
    for mode in dispatch_modes():
        if getattr(mode, "_mode_key", None) is not None:  # one of PyTorch's tracers
            raise ValueError(
                f"{call} inside {_name(mode)}: a step on tensors without numbers, or inside another trace, is not "
                "possible. Call it outside the block."
            )
        if not seen:
            raise ValueError(
                f"{call} inside {_name(mode)}, a TorchDispatchMode: compiled code and replayed graphs have no "
                'operators that it could see. Pass Policy(lower="eager", cuda_graph=False), under which it sees every '
                "operator of the program, or leave it around the call."
            )


def _name(mode: object) -> str:
    kind = type(mode)
    return f"{kind.__module__}.{kind.__qualname__}"


def outside(function: F) -> F:
    """Wraps the function so that it runs under none of the caller's modes."""

    @untraced
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with outside_modes():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def untraced(function: F) -> F:
    """The function, which a caller under `torch.compile` runs as it is, between two graphs; takes 1 µs."""
    inner = torch.compiler.disable(function, reason="fsdp_compiled compiles the step by itself")

    @wraps(function)  # a second wrapper, since torch.compile(sharded.step) removes that of `disable`
    def run(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return run  # type: ignore[return-value]
