"""``Policy(tp=...)``: cuts a model that was not cut with `parallelize_module`, by patterns of module names.

    Policy(tp="auto")                                           the plan that the model brings, ``model.tp_plan``, as
                                                                models of transformers do, or one that is derived
    Policy(tp={"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output"})

Styles have the names that transformers uses; each is one of PyTorch's own. Every rank first checks everything, and only
then cuts the model. Tied parameters stay tied, and the optimizer gets the parameters that replaced its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.distributed.mesh import Mesh
from fsdp_compiled.runtime.tensor_parallel.derived_plan import Derived, derive, patterns

STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),  # its name in transformers 4
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A norm of heads, [batch, time, heads, size]; each rank has some of the heads.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=-2, use_local_output=True),
}
BY_HAND = 'Cut it with PyTorch\'s own parallelize_module(model, mesh["tp"], plan), and leave Policy.tp out.'


@dataclass(frozen=True)
class Cuts:
    """How the model is cut: ``styles`` by module name; ``notes`` describe the cuts in the plan."""

    styles: Mapping[str, str]
    notes: tuple[str, ...]


def find_cuts(
    model: nn.Module, optimizer: Optimizer | None, wanted: Any, mesh: Mesh, loss: Callable[..., Any] | None = None
) -> Cuts:
    """Finds what to cut. Raises ``ValueError``, with nothing changed, if it cannot be cut like that."""
    if mesh.tp_mesh is None:
        raise ValueError(
            'Policy.tp says how to cut the model along the axis "tp", which the mesh does not have: '
            'init_device_mesh(device, (data, tp), mesh_dim_names=("shard", "tp")).'
        )
    if odd := next((name for name, one in named_parameters(model) if isinstance(one, DTensor)), None):
        raise ValueError(f"Policy.tp is given, but {odd} is a DTensor: the model was cut before. Do one of both.")
    modules = dict(model.named_modules())
    own = _own_plan(model) if wanted == "auto" else None
    left: tuple[str, ...] = ()
    if wanted == "auto" and not own:
        derived = _derived(model, loss, mesh.tp)
        alone = (f"whole on every rank along tp: {', '.join(derived.alone)}",) if derived.alone else ()
        styles, left = dict(derived.styles), (*alone, *derived.left)
        shown, whose = patterns(styles, modules), f"a plan derived from {type(model).__name__} and tried"
    else:
        shown = own or dict(wanted)
        whose = f"the tp_plan of {type(model).__name__}" if own else "Policy.tp"
        styles = _named(model, shown, whose, strict=not own)
        _check_heads(model, mesh.tp)
    for name, style in styles.items():
        _check_module(name, modules[name], style)
    for places in _tied(model, styles):
        kinds = {(styles.get(path), type(module)) for path, module, _ in places}
        dims = {_dim(kind, style) for style, kind in kinds}
        if len(dims) > 1:
            first, other = (f"{path}.{name}" for path, _, name in places[:2])
            raise ValueError(
                f"{first} and {other} are one parameter, which {whose} cuts in one place and not, or otherwise, in the "
                f"other: the tie would break. Give both modules styles that cut the same dim. {BY_HAND}"
            )
    for path in styles:
        for parameter in modules[path].parameters(recurse=False):
            if optimizer is not None and optimizer.state.get(parameter):
                raise ValueError(
                    f"{type(optimizer).__name__} has state of {path} already, which would be of other shapes. Give "
                    "Policy.tp with an optimizer that has made no step, and load its state afterwards."
                )
    said = ", ".join(f"{pattern}: {style}" for pattern, style in shown.items())
    return Cuts(styles, (f"cut along tp by {whose}: {said}", *left))


def apply_cuts(model: nn.Module, optimizer: Optimizer | None, cuts: Cuts, mesh: Mesh) -> None:
    """Cuts the model. Collective along tp."""
    assert mesh.tp_mesh is not None
    tables = ((module, module._parameters) for module in model.modules())
    before = {(module, name): one for module, own in tables for name, one in own.items() if one is not None}
    made = {name: _style(model.get_submodule(name), style, mesh.tp) for name, style in cuts.styles.items()}
    parallelize_module(model, mesh.tp_mesh, made)
    new: dict[int, nn.Parameter] = {}
    for (module, name), old in before.items():
        now = module._parameters[name]
        if now is None or now is old:
            continue
        if id(old) not in new:
            now.requires_grad_(old.requires_grad)
            now.__dict__.update(old.__dict__)
            new[id(old)] = now
        module._parameters[name] = new[id(old)]
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [new.get(id(one), one) for one in group["params"]]


def _style(module: nn.Module, style: str, tp: int) -> ParallelStyle:
    """The style. If parts differ in size between ranks, the output is a DTensor, which knows the whole size."""
    dim = _dim(type(module), style)
    if style == "colwise" and dim is not None and module.weight.shape[dim] % tp:  # type: ignore[union-attr, operator]
        return ColwiseParallel(use_local_output=False)
    return STYLES[style]()


def _own_plan(model: Any) -> dict[str, str]:
    """The plan that the model brings; empty if it brings none."""
    return dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})


def _derived(model: nn.Module, loss: Callable[..., Any] | None, tp: int) -> Derived:
    try:
        return derive(model, loss, tp)
    except ValueError as error:
        raise ValueError(
            f'Policy.tp is "auto", and {type(model).__name__} brings no plan (tp_plan, as transformers\' models do). '
            f"None could be derived: {error}\nGive one by patterns, such as "
            'Policy(tp={"layers.*.up": "colwise", "layers.*.down": "rowwise"}).'
        ) from error


def _named(model: nn.Module, plan: Mapping[str, str], whose: str, strict: bool) -> dict[str, str]:
    """Styles by module name. ``strict``: each pattern must name a module. The plan of a class need not: it may name
    what this configuration does not have."""
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ValueError(
                f"{whose} has {pattern}: {style!r}, which is not supported here; known are {', '.join(STYLES)}. "
                f"{BY_HAND}"
            )
        wished = re.compile(".".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
        found = [name for name, _ in model.named_modules() if wished.fullmatch(name)]
        if not found and strict:
            raise ValueError(f"{whose} names {pattern}, and there is no such module in {type(model).__name__}.")
        styles |= dict.fromkeys(found, style)
    if not styles:
        raise ValueError(f"{whose} names no module that there is: {', '.join(plan)}. {BY_HAND}")
    return styles


def _check_module(name: str, module: nn.Module, style: str) -> None:
    if style != "replicated_with_grad_allreduce" and _dim(type(module), style) is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}, which has no style {style!r}: nn.Linear and nn.Embedding have. "
            f"{BY_HAND}"
        )


def _check_heads(model: Any, tp: int) -> None:
    config = getattr(model, "config", None)
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % tp:
            raise ValueError(f"{type(model).__name__} has {what}={heads}, which {tp} ranks along tp do not divide.")


def _dim(kind: type[nn.Module], style: str | None) -> int | None:
    """Along which dim the style cuts a module's weight; None: it does not."""
    column = style in ("colwise", "colwise_gather_output", "colwise_rep")
    if style in (None, "replicated_with_grad_allreduce"):
        return None
    if issubclass(kind, nn.Linear):
        return 0 if column else 1
    return (1 if column else 0) if issubclass(kind, nn.Embedding) else None


def _tied(model: nn.Module, styles: Mapping[str, str]) -> Iterator[Sequence[tuple[str, nn.Module, str]]]:
    """For each parameter that is in several places, at least one of which is cut, all of these places."""
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((path, module, name))
    for places in found.values():
        if len(places) > 1 and any(path in styles for path, _, _ in places):
            yield places
