"""Switches of the process and the thread, stacks of modes and of the default device, in torch 2.11 to 2.14: of
``torch._C``, ``torch.utils`` and ``torch.overrides``; and the two calls that stand in a trace for ``torch.autocast``.

Each name is in the table of `names`. What is asked at every call has an answer where its name is missing, too: that
there is no such mode, which `names` says once.

Of ``torch._C`` the package relies on: what is asked of the caller's modes at every call, in the names that
``torch.backends``, ``torch.autocast`` and ``torch.overrides`` are written in (`capture.global_modes`); hooks for saved
tensors; whether a node of backward will run, and backward's engine; dispatch below autograd; and a CUDA allocator's
pools (`lower.cuda_device`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_compiled.torch_private.names import broken, find, has, there


def _or(name: str, otherwise: Callable[..., Any], *given: Any, kind: type = object) -> Callable[..., Any]:
    """The function of this name; the other one where that does not take what is ``given``, or gives another type."""
    if not has(name):
        return otherwise
    found: Callable[..., Any] = find(name)
    try:
        if not isinstance(result := found(*given), kind):
            raise TypeError(f"it gives a {type(result).__name__}")
        return found
    except Exception as error:
        broken("modes", name, error)
        return otherwise


def _if(name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The same of what cannot be tried."""
    return find(name) if has(name) else otherwise  # type: ignore[no-any-return]


_KNOWN = ("cpu", "cuda", "mps", "xpu")
DEVICES = tuple(_or("torch._C._autocast_supported_devices", lambda: _KNOWN, kind=list | tuple)())  # type: ignore[arg-type]
enter_autocast = find("torch.amp.autocast_mode._enter_autocast")
exit_autocast = find("torch.amp.autocast_mode._exit_autocast")
any_autocast = _or("torch._C._is_any_autocast_enabled", lambda: any(map(torch.is_autocast_enabled, DEVICES)), kind=bool)
count_function_modes = _or("torch._C._len_torch_function_stack", lambda: 0, kind=int)
pop_function_mode = _if("torch._C._pop_torch_function_stack", lambda: None)
push_function_mode = _if("torch._C._push_on_torch_function_stack", lambda mode: None)
function_modes = _or("torch.overrides._get_current_function_mode_stack", lambda: [], kind=list)
count_dispatch_modes = _or("torch._C._len_torch_dispatch_stack", lambda: 0, kind=int)
dispatch_modes = _or("torch.utils._python_dispatch._get_current_dispatch_mode_stack", lambda: [], kind=list)
is_in_torch_dispatch_mode = _or("torch.utils._python_dispatch.is_in_torch_dispatch_mode", lambda: False, kind=bool)
without_modes = _or("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
no_dispatch = _or("torch.utils._mode_utils.no_dispatch", contextlib.nullcontext)
saved_tensors_hooks = _or("torch._C._autograd._top_saved_tensors_default_hooks", lambda _ignored: None, True)
tracing_state = _or("torch._C._get_tracing_state", lambda: None)
transform = _or("torch._C._functorch.peek_interpreter_stack", lambda: None)
DeviceContext = find("torch.utils._device.DeviceContext")
device: Any = find("torch.utils._device")


class _Names:
    """``torch._C``, with a placeholder for what it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch._C, name) if has(f"torch._C.{name}") else find(f"torch._C.{name}")


C: Any = _Names()


def will_run(node: Any) -> bool:
    """Whether the backward that runs now reaches this node of autograd; False where nobody can tell."""
    name = "torch._C._will_engine_execute_node"
    if not there("backward by parts"):
        return False
    try:
        return bool(find(name)(node))
    except TypeError as error:
        broken("backward by parts", name, error)
        return False


def run_backward(
    results: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """As `torch.autograd.backward`, during which a mode that sees functions is off: it would not see a part of forward
    that is computed again."""
    engine = find("torch.autograd.Variable._execution_engine")
    engine.run_backward(
        tuple(results), tuple(tangents), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True
    )


__all__ = ["C", "run_backward", "will_run"]
