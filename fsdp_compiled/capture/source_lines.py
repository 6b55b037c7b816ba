"""Finds the submodule behind a node, and the user's line behind an error.

AOTAutograd and Dynamo leave these in the metadata of nodes and in the attributes and text of exceptions.
"""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fsdp_compiled.torch_private.dynamo import Unsupported, UserError

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the package


MARK = "stretch"  # begins a key in ``nn_module_stack`` that says which stretch of a run of equal ones a node came from


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def path_of(node: fx.Node) -> str:
    """The innermost submodule that the node came from: ``layers.0.attention``, ``(model)``; empty for the loss.

    A node that autograd itself adds to sum two gradients has the path of the node before it.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack and is_backward(node) and node.prev.op == "call_function":
        return path_of(node.prev)
    return next(filter(None, (_submodule(text) for text, _ in reversed(stack.values()))), "")


@lru_cache(1 << 14)
def _submodule(text: str) -> str:
    """The same, from Dynamo's name of one module; empty if the model does not have it. Cached: many nodes share one."""
    while (flat := re.sub(r"getattr\(([^()]*), '([^']+)'\)", r"\1.\2", text)) != text:
        text = flat
    match = re.search(r"\.model\.?(.*)$", text)
    if not match:
        return ""
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", match[1].replace("_modules", "")).strip(".")
    return path or "(model)"


def stretch_of(node: fx.Node) -> tuple[int, int] | None:
    """The equal stretch that the node came from, as (run, stretch). Nodes that autograd adds: as in `path_of`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack and is_backward(node) and node.prev.op == "call_function":
        return stretch_of(node.prev)
    for key in reversed(stack):
        if str(key).startswith(MARK):
            run, kept = str(key).split()[1:]
            return int(run), int(kept)
    return None


def reason(error: BaseException) -> str:
    """Dynamo's message, without its own stack and its hints to report an issue.

    For an exception that the user's code or an operator raised, only its own message.
    """
    said = str(error).split("from user code:")[0]
    if "<function Sharded." in said:
        return "A Sharded object of compile_sharded is called inside a loss: a program reaches no other model's shards."
    if "return _call(self, name, function)(args, named)" in str(error):  # a line of `fsdp.module_class`
        return "A model that fully_shard sharded is called inside of another one's loss or forward."
    if "ShardedParameter" in said:
        return "A parameter that compile_sharded took over is read past the model (a closure, a list, another model)."
    if match := re.search(r"raised exception \w+\('(This \w+ was taken over by compile_sharded[^.;:]*)", said):
        return f"{match[1]}: it is called past the model that the loss is given."
    for own in (r"raised exception (\w+)\((['\"])(.*)\2\)$", r": got (\w+)\((['\"])(.*)\2\)$"):
        if found := re.search(own, said, re.MULTILINE):
            return f"{found[1]}: {found[3]}"
    lines = str(error).split("\n\n")[0].strip().splitlines()
    return "\n  ".join(line.strip() for line in lines if not line.strip().startswith("Hint:"))


CURES = (
    (
        "A Sharded object",
        "put both models into one module (nn.ModuleDict) and shard that; or compute the other's results outside, "
        "other(x), and pass them with the batch. Two Sharded cannot be differentiated through each other yet.",
    ),
    (
        "A model that fully_shard sharded",
        "compute its results outside, teacher(x), and pass them with the batch; or leave fully_shard out, and shard "
        "both models as one.",
    ),
    (
        "got mixed torch.Tensor and DTensor",
        "a parameter of fully_shard is reached past the module that is called. Make what holds it a submodule of that "
        "one (a teacher: frozen, registered as any other); or compute with it outside, and pass what it gives.",
    ),
    (
        "compile_sharded",
        "read it through the model that the loss is given (model.head.weight). A second model that is not trained can "
        "be a submodule of that one, frozen with requires_grad_(False) before compile_sharded. Where both are trained "
        "(a GAN), one program cannot be differentiated through the other yet: pass the other's outputs, other(x), or "
        "its weights with the batch; or call the other model in a loss of your own, outside of compile_sharded.",
    ),
    (
        "data-dependent branching",
        "a program has no branches on tensor values: use torch.where; check values before they go in; set the rate of "
        "layers that are skipped at random (layerdrop) to 0.",
    ),
    (
        "data-dependent expression",
        "keep as a tensor what is computed from a tensor; .item() and float() make it a number that a program cannot "
        "hold. BatchNorm with momentum=None does so: give it a momentum. update_bn sets it so: call it inside of "
        "`with model.gathered():`, or with the model of compile_sharded, sharded.model.",
    ),
    (
        "dynamic shape operator",
        "the shape of its result is in the data: give sizes as Python numbers, or pad. ctc_loss is such: return from "
        "forward what it needs, and compute it in the loop, under fully_shard.",
    ),
    (
        "returning intermediate with requires_grad_",
        "call requires_grad_() on the input in the loop, before the model is called; or train with compile_sharded, "
        "whose program ends in the loss.",
    ),
    (
        "set_ on a graph input",
        "in the place of `x.data = ...`, write a buffer's values, x.copy_(...); of a parameter, which the optimizer "
        "alone updates, compute with a changed copy, as torch.nn.utils.parametrize does.",
    ),
    (
        "a leaf Variable that requires grad",
        "forward writes an input that requires a gradient, which a program cannot: write a copy, x.clone(), or leave "
        "the input as it is, nn.ReLU(inplace=False).",
    ),
    (
        "setattr() on Tensor.requires_grad",
        "leave it out of forward: a program finds by itself what needs a gradient (Wav2Vec2 and its kin: "
        "model.freeze_feature_encoder() leaves it out).",
    ),
    (
        "requires_grad",
        "set it on parameters before compile_sharded. To differentiate by inputs, use torch.func.grad or vjp; with "
        "torch 2.13 or later, x.requires_grad_() on the batch and torch.autograd.grad too.",
    ),
    ("backwards hooks", "put hooks on tensors (tensor.register_hook), or scale gradients with an autograd.Function."),
    ("fake impl", "register one with torch.library.register_fake: it says what shape the operator returns."),
    (
        "manual_seed",
        "seed outside, before compile_sharded or between steps: a program draws from the default generator.",
    ),
    (
        "random.",
        "draw random numbers with torch, from its default generator, or draw outside and pass them in with the batch; "
        "set the rate of layers that are skipped at random (layerdrop) to 0.",
    ),
    ("torch.jit", "pass the original module: TorchScript cannot be read."),
    ("TracedModule", "pass the original module: TorchScript cannot be read."),
    ("checkpoint_sequential", "call torch.utils.checkpoint.checkpoint on each stretch of the layers."),
    (
        "context_fn",
        "enter contexts, such as autocast, inside of the function that is checkpointed; context_fn may be "
        "functools.partial(create_selective_checkpoint_contexts, ...).",
    ),
    ("disallow_in_graph", "of torch.func, take jvp, vjp or grad in the place of linearize."),
    (
        "pack_padded_sequence",
        "give the layer padded rows: in one direction, its outputs up to a row's length are the same; mask the others.",
    ),
    ("for hook removal", "leave a hook that forward removes again out of it."),
    (
        "torch.distributed.nn.",
        "of torch.distributed.nn.functional, all_reduce and all_gather are traced; for others use what it names.",
    ),
    ("compiler.disable", "remove torch.compiler.disable from what forward calls."),
    ("nn.Parameter", "build modules and parameters in __init__, where the optimizer finds them."),
)
# The cures by words in Dynamo's line "Developer debug context".
CONTEXTS = (
    (
        ("(Generator)", "torch._C.Generator"),
        "a program draws from PyTorch's default generator: leave generator= out; or draw outside and pass the numbers "
        "in with the batch.",
    ),
    (
        ("RandomState", "numpy.random", "default_rng", "<cyfunction seed"),
        "draw with torch, from its default generator; or draw outside and pass the numbers in with the batch.",
    ),
    (
        ("rng_state", "fork_rng", "initial_seed"),
        "save, restore and ask for generators' states outside, around the step: what a program draws is drawn once.",
    ),
)
CURE = (
    "move the line out of forward and the loss, to where the batch is made or the result is used; or write it with "
    "operators of torch."
)


def cure(reason: str, error: BaseException | None = None) -> str:
    """The cure for Dynamo's error, found by its reason and by the rest of its text; empty if none is known."""
    context = re.search("Developer debug context:(.*)", str(error))
    for names, text in CONTEXTS:
        if context is not None and any(name in context[1] for name in names):
            return text
    return next((text for key, text in CURES if key.lower() in reason.lower()), "")


def explanation(model: str, error: BaseException) -> str:
    """The error as a person reads it: the user's line, what went wrong there, and the cure where there is one."""
    why = reason(error)
    traced = isinstance(error, Unsupported | UserError) and not re.match(r"\w+(Error|Exception): ", why)
    how = cure(why, error) or CURE * traced
    what = "cannot be traced whole" if traced else "failed while it was traced"
    return f"{model} {what}.\n{user_line(error)}\n  Why: {why}" + f"\n  Cure: {how}" * bool(how)


def is_users(path: str) -> bool:
    """Whether a file belongs neither to PyTorch nor to this package nor to Python itself."""
    if "site-packages" not in path and path.startswith(sysconfig.get_path("stdlib")):
        return False
    return not path.startswith((os.path.dirname(torch.__file__) + os.sep, OURS))


def _line_of(frame: traceback.FrameSummary) -> str:
    line = f"\n    {frame.line}" if frame.line else ""
    return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}{line}'


def user_line(error: BaseException) -> str:
    """The innermost line of the user's code that Dynamo was reading: ``File "model.py", line 3, in forward``; and the
    line of PyTorch's own that it had come to from there."""
    stack = getattr(error, "real_stack", None)
    if stack:
        own = [frame for frame in stack if is_users(frame.filename)]
        frame = (own or stack)[-1]
        inner = [_line_of(one) for one in stack[-1:] if one is not frame and not one.filename.startswith(OURS)]
        if not inner and (found := re.search(r"Caused by: .*\((\S+):(\d+) in (\w+)\)", str(error))):
            inner = ['  File "torch/{}", line {}, in {}'.format(*found.groups())]
        return "\n".join([_line_of(frame), *inner])
    match = re.findall(r'File "[^"]+", line \d+, in [^\n]+\n[^\n]+', str(error))
    match = [text for text in match if is_users(text.split('"')[1])] or match
    return "  " + match[-1] if match else "  " + "".join(traceback.format_exception_only(error)).splitlines()[0]


def words(text: str, scope: Mapping[str, Any]) -> str:
    """Dynamo's names of things as the user would write them. ``scope``: what Dynamo's names are evaluated in."""

    def cell(match: re.Match[str]) -> str:
        with contextlib.suppress(Exception):
            function = eval(match[1], dict(scope))
            return f"{function.__name__}'s {function.__code__.co_freevars[int(match[2])]}"
        return match[0]

    return plain_names(re.sub(r"([LG]\['[^()\s]*)\.__closure__\[(\d+)\](?:\.cell_contents)?", cell, text))


def plain_names(text: str) -> str:
    """``L['objective']._modules['model']._modules['a'].p`` -> ``model.a.p``."""
    text = text.replace("L['objective']", "objective").replace("._modules['model']", ".model")
    text = re.sub(r"\.(?:__dict__\['_modules'\]|_modules|_parameters|_buffers)\['([^']+)'\]", r".\1", text)
    text = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", text)
    text = re.sub(r"G\['__import_(\w+?)'\]", lambda match: match[1].replace("_dot_", "."), text)
    text = re.sub(r"G\['([^']+)'\]", r"\1", text)  # a global of the user's
    text = re.sub(r"(?:___)?dict_contains\((.*), (.*)\)", r"\1 in \2", text)
    return re.sub(r"(?<![\w.])objective\.(model|loss)\b", r"\1", text).replace("L['loss']", "loss")
