"""``torch._C``, in torch 2.11 to 2.14: switches of the process and the thread without a Python function of their own.

Relied on: what is asked of the caller's modes at every call, in the names that ``torch.backends``, ``torch.autocast``
and ``torch.overrides`` are written in (`capture.global_modes`); hooks for saved tensors; whether a node of backward
will run, and backward's engine; dispatch below autograd; and a CUDA allocator's pools (`lower.cuda_device`). Each is in
the table of `names`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compiled.torch_private.names import broken, find, has, there


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
