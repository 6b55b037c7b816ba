"""Chooses how to capture a model: the fast way, or the plain way, which replaces no function of PyTorch.

The fast way uses private names (`torch_private.names`), which may mean something else in another build of PyTorch. So a
trial first compares it with the plain way, on a model of three equal blocks. It runs once for each PyTorch and version
of this package, since its answer is kept on disk. And if a capture ends in an internal error, not in a refusal, the
plain way is tried before the model is blamed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compiled.capture import disk_cache
from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.captured import Capture, Tensors
from fsdp_compiled.capture.dynamo import trace_whole
from fsdp_compiled.capture.global_modes import outside_modes
from fsdp_compiled.capture.source_lines import OURS
from fsdp_compiled.ir.nodes import fake_tensor
from fsdp_compiled.torch_private.names import (
    TABLE,
    UnsupportedTorch,
    find,
    has,
    plain,
    plainly,
    stay_plain,
    unsupported,
)

log = logging.getLogger("fsdp_compiled")
# Errors that may be a fault of this package, or come from a private name of PyTorch that has changed.
INTERNAL = (
    AttributeError, TypeError, LookupError, NameError, AssertionError, ImportError, NotImplementedError,
    UnsupportedTorch,
)  # fmt: skip


def capture(model: nn.Module, *given: Any, **named: Any) -> Capture:
    """Calls `dynamo.trace_whole` with these arguments, the fast way or the plain way.

    Raises `CaptureError` with the user's line and the cure; `UnsupportedTorch` if no model can be captured with this
    PyTorch.
    """
    trace = functools.partial(trace_whole, model, *given, **named)
    if not plain() and (why := trial()):
        stay_plain(why)
    try:
        return trace()
    except Exception as error:
        if not _is_internal(error):
            raise
        if not plain():
            with plainly():
                try:
                    made = trace()
                except Exception:
                    _blame(error)
                    raise error from None
            log.warning(
                "%s was captured the plain way: the fast way ended in %s. Please report it.",
                type(model).__name__, _text(error),
            )  # fmt: skip
            return made
        _blame(error)
        raise


def _root(error: BaseException) -> BaseException:
    """The first error of a chain, which caused the others."""
    while (before := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = before
    return error


def _text(error: BaseException) -> str:
    root = _root(error)
    return f"{type(root).__name__}: {str(root).partition(chr(10))[0]}"


def _is_internal(error: Exception) -> bool:
    """Whether the fault may be in this package or in a private name of PyTorch: the error is no refusal, and was raised
    in this package or at most three calls below."""
    root = _root(error)
    if isinstance(root, UnsupportedTorch):
        return True
    if isinstance(root, CaptureError) or not isinstance(root, INTERNAL):
        return False
    files, entry = [], root.__traceback__
    while entry is not None:
        files.append(entry.tb_frame.f_code.co_filename)
        entry = entry.tb_next
    ours = [place for place, file in enumerate(files) if file.startswith(OURS)]
    return bool(ours) and ours[-1] >= len(files) - 4


def _blame(error: Exception) -> None:
    """Raises `UnsupportedTorch` if not even a model that is known to work can be captured the plain way."""
    try:
        _try_plainly()
    except UnsupportedTorch as again:
        raise again from error


def _try_plainly() -> str:
    try:
        with plainly():
            return _try()
    except Exception as error:
        raise unsupported(f"a model of three layers cannot be captured ({_text(error)})") from error


@functools.cache
def trial() -> str:
    """Why the fast way cannot be trusted here; empty if it gives the same program as the plain way. Kept on disk."""
    folder = disk_cache.folder()
    place = None if folder is None else folder / "ways" / _key()
    if place is not None and (known := disk_cache.read(place, bytes.decode)) is not None:
        return known
    wanted = _try_plainly()
    try:
        why = "" if _try() == wanted else "on a small model the fast way gives another program"
    except Exception as error:
        why = f"on a small model the fast way ends in {_text(error)}"
    if place is not None:
        disk_cache.write(place, why.encode())
    return why


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + nn.functional.dropout(self.linear(self.norm(x)).tanh(), self.rate, self.training) * self.seen


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _try() -> str:
    """The program of a small model, as text."""
    with outside_modes(), torch.device("meta"):
        model = _Model()
    mode = FakeTensorMode()

    def fake(value: torch.Tensor) -> torch.Tensor:
        made = fake_tensor(mode, tuple(value.shape), value.stride(), value.dtype, torch.device("cpu"))
        made._is_param = isinstance(value, nn.Parameter)  # type: ignore[attr-defined]
        return made.requires_grad_(value.requires_grad)

    parameters = {name: fake(value) for name, value in model.named_parameters()}
    buffers = {name: fake(value) for name, value in model.named_buffers()}
    batch = fake_tensor(mode, (2, 4), (4, 1), torch.float32, torch.device("cpu"))
    return trace_whole(model, None, Tensors(parameters, buffers), (batch,), {}, gradient=True).program.text()


def _key() -> str:
    """A key that changes whenever a function or class of the table changes."""
    found = hashlib.sha256(repr(sorted(disk_cache.versions().items())).encode())
    for use in TABLE.values():
        for name in use.names:
            found.update(f"{name} {_code(find(name)) if has(name) else None}\n".encode())
    return found.hexdigest()


def _code(thing: Any) -> Any:
    """The code of a function, or of the functions of a class; for anything else the name of its type."""
    thing = getattr(thing, "__func__", thing)
    if isinstance(code := getattr(thing, "__code__", None), CodeType):
        return code.co_code, code.co_varnames, code.co_names, str(code.co_consts).split(" at 0x")[0]
    if isinstance(thing, type):
        return [(name, _code(value)) for name, value in sorted(vars(thing).items()) if hasattr(value, "__code__")]
    return type(thing).__qualname__
