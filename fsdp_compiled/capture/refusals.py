"""Refuses what a trace would answer otherwise than the call, without an error. The message has the user's line.

*Reads of a tensor.* While it traces, Dynamo has fake tensors in the place of the tensors. They have no gradient, no
version, no base and none of the user's attributes, and a number that is formatted into a string becomes the name of a
symbol. Most of these reads end in an error of Dynamo's own; those that would get a wrong answer are refused here.

*Random numbers.* A program draws with PyTorch's operators from PyTorch's default generator. Dynamo would trace more: it
makes constants of the numbers that `random` draws, turns NumPy's functions into PyTorch's, with a different random
stream, and leaves out calls of `torch.seed`. In each case the numbers would differ from eager PyTorch's.

*Graphs*: a loss, and an ``autograd.Function``, of which a trace has another meaning (`check_graphs`). Written for torch
2.11 to 2.14.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

from fsdp_compiled.capture.aot import CaptureError
from fsdp_compiled.capture.source_lines import user_line
from fsdp_compiled.torch_private.dynamo import ConstantVariable, UserError, UserErrorType, config
from fsdp_compiled.torch_private.names import TABLE, has, replaced

NEVER = {
    "_version": "how often a tensor was written",
    "_base": "which tensor another is a view of",
}
SEEDING = ("torch.random", "torch.cuda.random")


def refuse(what: str) -> None:
    raise UserError(UserErrorType.ANTI_PATTERN, what)


@contextmanager
def refused(asked: set[str]) -> Iterator[None]:
    """Inside, Dynamo raises for such reads, and for such draws. ``asked`` takes in the names of attributes that are not
    PyTorch's."""
    draws = [(name, _refuse_draw) for name in filter(has, TABLE["random calls"].names[0].split("|"))]
    numpys = config.patch(use_numpy_random_stream=True)  # Dynamo itself refuses to trace these
    with numpys, replaced("random calls", *draws), _reads_refused(asked):
        yield


def _refuse_draw(_draw: Any, _tx: Any, function: Callable[..., Any], *_: Any) -> Any:
    name = getattr(function, "__name__", "")
    called = "a random.Random" if name == "call_random_meth" else f"random.{name}"
    refuse(f"{called} draws from a generator of Python's; a program would repeat what it drew when it was traced.")


def seeding(graph: fx.Graph) -> fx.Node | None:
    """The first call that seeds a generator or saves its state, which a program would leave out."""
    return next((node for node in graph.nodes if getattr(node.target, "__module__", None) in SEEDING), None)


def _reads_refused(asked: set[str]) -> AbstractContextManager[None]:
    known = {*dir(torch.Tensor), *dir(torch.nn.Parameter)}
    of_tensors, of_storages, _, of_texts, *_ = TABLE["unknown reads"].names

    def var_getattr(read: Any, self: Any, tx: Any, name: str) -> Any:
        if name in NEVER:
            refuse(f"tensor.{name} is asked for: {NEVER[name]} is not known when a program is traced.")
        if name in ("grad", "_grad") and not tx.output.side_effects.has_pending_mutation_of_attr(self, "grad"):
            if self.source is None and self.has_grad_fn:
                return ConstantVariable.create(None)  # as for every tensor that is computed from parameters
            refuse("tensor.grad is asked for: a program is traced without the gradients that tensors have by then.")
        if name not in known:
            asked.add(name)
        return read(self, tx, name)

    def call_method(storage: Any, self: Any, tx: Any, name: str, *given: Any) -> Any:
        if name in ("size", "nbytes"):
            refuse(f"untyped_storage().{name}() is asked for: a view's storage is its own when a program is traced.")
        return storage(self, tx, name, *given)

    def hash_impl(*_: Any) -> Any:
        refuse("a text with a number in it that is read out of a tensor is looked up in a dictionary or set.")

    return replaced("unknown reads", (of_tensors, var_getattr), (of_storages, call_method), (of_texts, hash_impl))


def check_attributes(batch: Mapping[str, torch.Tensor], asked: Iterable[str]) -> None:
    """Raises ``ValueError`` if a tensor of the batch has an own attribute that forward reads on tensors. ``batch``: the
    tensors by place."""
    for place, tensor in batch.items():
        if found := sorted(set(asked) & vars(tensor).keys()):
            raise ValueError(
                f"batch {place} has an attribute of its own that forward or the loss asks for ({', '.join(found)}), "
                "and a program knows nothing of what it is at each call. Pass its value with the batch."
            )


def check_graphs(module: fx.GraphModule, code: Collection[types.CodeType]) -> None:
    """Raises `CaptureError` for what a trace of this code takes for something else than eager PyTorch does."""
    keeps_none = any("set_materialize_grads" in one.co_names for one in code)
    for graph in (one.graph for one in module.modules() if isinstance(one, fx.GraphModule)):
        _check_labels(graph)
        if keeps_none:
            _check_missing_gradients(graph)


def _check_labels(graph: fx.Graph) -> None:
    """Refuses ``multilabel_margin_loss``, of which PyTorch (2.11 to 2.14) traces a decomposition that counts what comes
    after the -1 that ends a row's labels."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") == "multilabel_margin_loss":
            raise CaptureError(
                "A trace of multilabel_margin_loss takes what comes after a row's -1 for labels.\n"
                f"{user_line(RuntimeError(node.stack_trace))}\n"
                "  Cure: write it with operators of torch; or compute it in the loop, under fully_shard."
            )


def _check_missing_gradients(graph: fx.Graph) -> None:
    """Refuses an ``autograd.Function`` whose backward may ask which of its gradients are None.

    It may after ``ctx.set_materialize_grads(False)``, if no gradient comes to one of its results: Dynamo traces it with
    a gradient for each.
    """
    reached: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in reached:
            reached.update(filter(_has_gradient, node.all_input_nodes))
        value = node.meta.get("example_value")
        if "autograd_function" not in str(node.target) or not isinstance(value, tuple):
            continue
        wanted = {place for place, result in enumerate(value) if getattr(result, "requires_grad", False)}
        if missing := wanted - {user.args[1] for user in node.users if user in reached}:
            raise CaptureError(
                "An autograd.Function calls ctx.set_materialize_grads(False), and no gradient comes to result "
                f"{min(missing)} of it: backward may ask whether it is None, which is not known when it is traced."
                f"\n{user_line(RuntimeError(node.stack_trace))}\n  Cure: leave set_materialize_grads out of it; a "
                "gradient that is missing is then zeros."
            )


def _has_gradient(node: fx.Node) -> bool:
    return bool(getattr(node.meta.get("example_value"), "requires_grad", True))
