"""Piece -> compiled function.

Compiled code is kept on disk, under a key that a piece has before it is traced. Inductor's own cache looks a graph up
by AOTAutograd's output, and making that takes longer in a warm start than all later steps.

Private surfaces of Inductor are touched here, in `piece`, in `cpp_compiler` and for the cache folder (`disk_cache`),
and nowhere else.

What a machine needs once can be done when the package is set up (`prepare_machine`, in ``make train``'s): trials of the
processor, and compiling the header that all kernels include (`cpp_compiler`). Both stay on disk, where a first run
finds them.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import getitem
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from fsdp_compiled.capture import disk_cache
from fsdp_compiled.capture.disk_cache import folder, settings
from fsdp_compiled.ir.nodes import fake_mode
from fsdp_compiled.kernels.aten_operators import TENSOR_FORMS, split_form
from fsdp_compiled.lower.cpp_compiler import compile_together, dealt_out, instructions, remembered, without_headers
from fsdp_compiled.lower.piece import Call, CompiledPiece, Piece
from fsdp_compiled.policy import Policy
from fsdp_compiled.torch_private.inductor import (
    CacheBase,
    CacheCompiledArtifact,
    CompiledArtifact,
    cache_dir,
    compile_alone,
    config,
    custom_backend_passes,
    torch_key,
)
from fsdp_compiled.torch_private.names import there

log = logging.getLogger("fsdp_compiled")
COMPILED = "compiled by Inductor"
PIECES = "pieces"  # in our part of the cache folder
# Namespaces of operators that belong to PyTorch or to this package.
KNOWN = ("aten", "prims", "_c10d_functional", "fsdp_compiled", "fsdp_compiled_cpu")
ITSELF = 20  # operators that take as long as the fixed cost of a piece, most of it its C++ compiler
FORMS = {**TENSOR_FORMS, "split_rows": split_form}  # what is compiled in the place of this package's operators


_compiled: WeakValueDictionary[str, CompiledPiece] = WeakValueDictionary()  # as long as a program uses them


def compile_all(pieces: Mapping[str, Piece]) -> dict[str, Call]:
    """Each compiled piece, by key: from this process, from the cache on disk, or compiled now, the largest first.

    Before compiling, logs the number at level INFO: ``compiling 7 of 12 pieces``.
    """
    if not pieces:
        return {}
    found: dict[str, Call] = {}
    around = _around()

    def compiled_now(piece: Piece) -> Callable[..., Any]:
        log.info("compiling %d of %d pieces (%d operators)", len(found) + 1, len(pieces), len(piece.nodes))
        return _artifact(piece)

    with remembered(folder()), compile_together(folder()):
        for key, piece in sorted(pieces.items(), key=lambda item: -len(item[1].nodes)):
            full = hashlib.sha256(f"{around} {key}".encode()).hexdigest()
            made = _compiled.get(full)
            if made is None:
                still = all(isinstance(node.meta["val"], torch.Tensor) for node in piece.inputs)
                artifact, source = (
                    _from_cache(piece, full, compiled_now) if still and around else (compiled_now(piece), COMPILED)
                )
                made = CompiledPiece(artifact, key, source)
                if still:
                    _compiled[full] = made  # else a size is dynamic; compiling asked about this program's sizes
            found[key] = made
    return found


def lowered(policy: Policy) -> Policy:
    """The policy, changed to the eager lowering where this PyTorch's Inductor is of an unknown version."""
    return policy if policy.lower != "inductor" or there("Inductor") else replace(policy, lower="eager")


def chooses_products() -> bool:
    """Whether Inductor is told to try several kernels for each matrix product."""
    return there("Inductor") and bool(config.max_autotune or config.max_autotune_gemm)


def cache_place(device: torch.device) -> tuple[str, str, str]:
    """Equal on ranks that share Inductor's cache on disk, on one host or several, and can run each other's code.

    A folder identifies itself, since the same path may be two folders on two hosts. Code is compiled for the processor
    that compiles it, so hosts with different processors do not wait for each other's.

    Inductor writes the GPU's number into its results: the device guard and the stream of the generated code
    (``torch.cuda._DeviceGuard(1)``, ``get_raw_stream(1)``), the target of kernels, and the folder that Triton keeps
    them in. So the pieces' keys contain the number, and ranks share code where each sees its GPU as the first: under
    ``torchrun --virtual-local-rank``, or with one GPU each in ``CUDA_VISIBLE_DEVICES``.
    """
    folder()  # replaces a folder that cannot be written
    return disk_cache.identity(Path(cache_dir())), ",".join(instructions()), str(device)


def divide(pieces: Mapping[str, Piece], count: int) -> list[dict[str, Piece]]:
    """Divides the pieces among this many ranks, each piece to one rank, the largest first."""
    return dealt_out(pieces, count, lambda piece: len(piece.nodes) + ITSELF)


def _around() -> str:
    """What a piece's compiled code depends on besides the piece; empty if that cannot be determined."""
    options = repr(sorted(config.get_config_copy().items()))
    if " at 0x" in options or any(custom_backend_passes.values()):  # a function of the user's takes part
        return ""
    system = CacheBase.get_system() if torch.cuda.is_available() else None  # which reads the whole of Triton
    return f"{torch_key().hex()} {system} {options} {settings()}"


def _from_cache(
    piece: Piece, key: str, compiled_now: Callable[[Piece], Callable[..., Any]]
) -> tuple[Callable[..., Any], str]:
    """The piece's code, read from disk, or compiled and written there; and where it came from."""
    place = folder()
    if place is None or not all(_is_known(node.target) for node in piece.nodes):
        return compiled_now(piece), COMPILED
    place = place / PIECES / key
    with without_headers():
        found = disk_cache.read(place, _unpack)
    if found is not None:
        return found, "from the cache on disk"
    made = compiled_now(piece)
    if isinstance(made, CacheCompiledArtifact) and made.is_saveable():
        disk_cache.write(place, _pack(made))
    return made, COMPILED


def _is_known(target: Any) -> bool:
    """Whether a key says what the operator does; the user may change the code of others."""
    return target is getitem or getattr(target, "namespace", "") in KNOWN


def _pack(artifact: CompiledArtifact) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        artifact.save(path=f"{place}/artifact", format="binary")
        return Path(place, "artifact").read_bytes()


def _unpack(content: bytes) -> CompiledArtifact:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return CompiledArtifact.load(path=file.name, format="binary")


def _artifact(piece: Piece) -> Callable[..., Any]:
    module = _expand(piece.graph_module(_in_tensor_form))
    try:
        return compile_alone(module, examples(piece), dynamic_shapes="from_graph")
    except Exception as error:  # any error of an Inductor pass that needs a size and gets none
        if not any(free_unbacked_symbols(value) for value in pytree.tree_leaves([n.meta["val"] for n in piece.nodes])):
            raise
        what = str(error).strip().splitlines()[0]
        log.warning("a piece whose sizes are in the data runs as it stands: Inductor cannot compile it (%s)", what)
        return piece.graph_module(_that_fits)


def _that_fits(node: fx.Node) -> None:
    """Turns a view into a reshape: kernels do not always lay out their results as the fake tensors say."""
    if node.target is torch.ops.aten.view.default:
        node.target = torch.ops.aten.reshape.default


def examples(piece: Piece) -> list[Any]:
    """Inputs like the piece's, except for their place in memory, in which equal pieces differ."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with fake_mode(piece.nodes[0].graph):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return [fresh(node.meta["val"]) for node in piece.inputs]


def _in_tensor_form(node: fx.Node) -> None:
    """Replaces an operator of this package by its tensor form, if it has one."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "fsdp_compiled":
        node.target = FORMS.get(target._schema.name.removeprefix("fsdp_compiled::"), target)


def _expand(module: fx.GraphModule) -> fx.GraphModule:
    """Traces through the Python functions that `_in_tensor_form` put in."""
    if not any(node.target in FORMS.values() for node in module.graph.nodes):
        return module
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with fake_mode(module.graph):
        return make_fx(module)(*examples)


def prepare_machine() -> None:
    """Does what a machine needs once: the trials, and the header of all kernels, by compiling an unused kernel.

    Logs nothing where there is no compiler: code that needs one reports that.
    """
    with suppress(Exception), remembered(folder()), FakeTensorMode():
        graph = torch.fx.Graph()
        given = graph.placeholder("matrix")
        result = graph.call_function(torch.ops.aten.relu.default, (given,))
        graph.output((result,))
        given.meta["val"] = result.meta["val"] = matrix = torch.empty(8, 8)
        compile_alone(torch.fx.GraphModule({}, graph), [matrix], dynamic_shapes="from_graph")
