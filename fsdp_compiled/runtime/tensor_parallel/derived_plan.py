"""A plan for tensor parallelism that nobody wrote: derived from a model's blocks, and tried before it is believed.

    q, k, v    colwise     a linear layer whose input all ranks have: each computes some of the outputs
    o          rowwise     one whose input is made of those outputs: each rank has a summand, which are added
    up, gate   colwise
    down       rowwise
    norms of heads, whose gradients are summands: replicated_with_grad_allreduce
    the widest embedding, and the last linear layer outside of the blocks: embedding_rowwise, colwise_gather_output

Which layer's output goes into which is read off autograd's graph of a block that ran on generated weights, not off
names. Whether such a pair may be cut is not read off anything: the cut block is run beside the whole one
(`runtime.tensor_parallel.trial`), and what does not give its outputs and derivatives is left whole, with the reason
in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_compiled.capture.model_tensors import named_parameters
from fsdp_compiled.runtime.tensor_parallel.example import Call, Example, find_example, record, used_by_hand
from fsdp_compiled.runtime.tensor_parallel.trial import generated, part_of_block, run, tried

SUMMED = "replicated_with_grad_allreduce"
PLAIN = (int, float, str, type(None))
INTERNAL = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Region:
    """Linear layers whose outputs are parts, and the ones that make sums of them."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def styles(self) -> dict[str, str]:
        return dict.fromkeys(self.columns, "colwise") | dict.fromkeys(self.rows, "rowwise")


@dataclass(frozen=True)
class Derived:
    """``styles`` by module name; ``left``: what stays whole on every rank though others like it are cut, and why;
    ``alone``: the linear layers that begin and end nothing."""

    styles: Mapping[str, str]
    left: tuple[str, ...]
    alone: tuple[str, ...]


def derive(model: nn.Module, loss: Callable[..., Any] | None, ranks: int) -> Derived:
    """Raises ``ValueError``, with nothing changed, where no call of the model is known or nothing can be cut."""
    example = find_example(model, loss)
    modules = dict(model.named_modules())  # a module that hangs in several places once
    blocks = [name for name in _blocks(model) if name in modules] or [""]
    calls, order = record(model, example, blocks)
    known: dict[Any, tuple[dict[str, str], dict[str, str]]] = {}
    styles: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for block in blocks:
        if block not in calls:
            reasons[block] = "it is not called"
            continue
        key = _key(modules[block], calls[block])
        if key not in known:
            known[key] = _of_block(modules[block], calls[block], ranks)
        within = f"{block}." if block else ""
        found, why = known[key]
        styles |= {within + name: style for name, style in found.items()}
        reasons |= {within + name: one for name, one in why.items()}
    by_hand = used_by_hand(model, example, [name for name in styles if isinstance(modules[name], nn.Linear)])
    for name in by_hand:
        block = next(one for one in blocks if name.startswith(f"{one}." if one else ""))
        styles = {other: style for other, style in styles.items() if block and not other.startswith(f"{block}.")}
        reasons[name] = "its weight is read by other code than its own forward"
    if not styles:
        raise ValueError(
            f"none of the model's linear layers could be cut. {' '.join(_told(reasons, modules)) or 'It has none.'}"
        )
    ends, why = _ends(model, example, ranks, blocks, order, styles)
    known_names = {*styles, *ends, *reasons, *why}
    rest = {name: "" for name, one in modules.items() if isinstance(one, nn.Linear) and name not in known_names}
    return Derived(styles | ends, tuple(_told(reasons | why, modules)), tuple(patterns(rest, modules)))


def _blocks(module: nn.Module, prefix: str = "") -> list[str]:
    """The elements of the outermost lists of modules that are made of others; experts are inside of those."""
    found: list[str] = []
    for name, child in module.named_children():
        elements = [key for key, one in child.named_children() if next(one.parameters(), None) is not None]
        composite = elements and all(next(child.get_submodule(key).children(), None) is not None for key in elements)
        if isinstance(child, nn.ModuleList | nn.Sequential) and composite:
            found += [f"{prefix}{name}.{key}" for key in elements]
        else:
            found += _blocks(child, f"{prefix}{name}.")
    return found


def patterns(styles: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The same by patterns, ``layers.*.up`` for all blocks' where they have one style."""
    found: dict[str, str] = {}
    for name, style in styles.items():
        pattern = _pattern(name)
        alike = {styles.get(other) for other in names if _pattern(other) == pattern}
        found[pattern if len(alike) == 1 else name] = style
    return found


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _told(reasons: Mapping[str, str], modules: Mapping[str, nn.Module]) -> list[str]:
    """A line for each reason, with the modules that it keeps whole."""
    found: dict[str, list[str]] = {}
    for name, why in patterns(reasons, modules).items():
        found.setdefault(why, []).append(name or type(modules[""]).__name__)
    return [f"left whole on every rank along tp: {', '.join(names)}: {why}" for why, names in found.items()]


def _key(block: nn.Module, call: Call) -> Any:
    """Equal for blocks that one trial speaks for: of the same classes, shapes, attributes and inputs."""
    said = []
    for name, module in block.named_modules():
        attributes = [
            (key, value if isinstance(value, PLAIN) else id(value))
            for key, value in vars(module).items()
            if key not in INTERNAL and not isinstance(value, torch.Tensor)
        ]
        hooks = [id(hook) for hooks in (module._forward_pre_hooks, module._forward_hooks) for hook in hooks.values()]
        said.append((name, type(module), tuple(attributes), tuple(hooks)))
    held = (*named_parameters(block, remove_duplicate=False), *block.named_buffers())
    return tuple(said), tuple((name, one.shape, one.dtype) for name, one in held), call.key()


def _of_block(block: nn.Module, call: Call, ranks: int) -> tuple[dict[str, str], dict[str, str]]:
    """Styles that were tried, by name in the block; and why the other linear layers are left whole."""
    reasons: dict[str, str] = {}
    modules = {name: module for name, module in block.named_modules() if name and type(module) is nn.Linear}
    columns = {name for name, module in modules.items() if module.out_features % ranks == 0}
    rows = {name for name, module in modules.items() if module.in_features % ranks == 0}
    for name in set(modules) - columns - rows:
        reasons[name] = f"{ranks} ranks divide neither its inputs nor its outputs"
    whole = generated(block)
    while True:
        try:
            regions = _regions(whole, call, columns, rows)
        except Exception as error:
            return {}, dict.fromkeys(modules, f"it could not be tried: {type(error).__name__}: {error}")
        if not regions:
            return {}, reasons
        styles = {name: style for region in regions for name, style in region.styles.items()}
        failure, norms = _trial(whole, call, styles, ranks)
        if failure is None:
            kept = {name: why for name, why in reasons.items() if name not in styles}
            return styles | norms, kept
        failed = [(region, failure) for region in regions]
        if len(regions) > 1:
            alone = [(region, _trial(whole, call, region.styles, ranks)[0]) for region in regions]
            failed = [(region, why) for region, why in alone if why is not None] or failed
        for region, why in failed:
            columns -= set(region.columns)
            if not set(reasons) & set(region.styles):
                reasons |= dict.fromkeys(region.styles, _cure(region, modules, why, ranks))


def _trial(
    whole: nn.Module, call: Call, styles: Mapping[str, str], ranks: int
) -> tuple[str | None, dict[str, str]]:  # fmt: skip
    """Why it is wrong, or None; and the norms whose gradients are summands."""
    verdict = tried(whole, call, styles, ranks)
    norms: dict[str, str] = {}
    for name in sorted(verdict.summed):
        path = name.rpartition(".")[0]
        module = whole.get_submodule(path)
        held = {f"{path}.{key}" for key, _ in named_parameters(module)}
        if not path or list(module.children()) or held - verdict.summed or isinstance(module, nn.Linear | nn.Embedding):
            return f"each rank would have a summand of the gradient of {name}", {}
        norms[path] = SUMMED
    return verdict.failure, norms


def _cure(region: Region, modules: Mapping[str, nn.Linear], why: str, ranks: int) -> str:
    takes = modules[region.rows[0]].in_features
    if len(region.columns) == 1 and (makes := modules[region.columns[0]].out_features) > takes:
        return (
            f"cut over {ranks} ranks, {why}. {region.columns[0]} makes {makes} numbers for the {takes} that "
            f"{region.rows[0]} takes: several things in one (q, k and v, or gate and up), which a cut would mix. Make "
            "each an nn.Linear of its own"
        )
    return (
        f"cut over {ranks} ranks, {why}. A number of heads, or a width, that the code takes for the whole is 1 / "
        f"{ranks} of it on a rank: write -1 for it in view, reshape and split, and let {ranks} divide the heads of "
        "queries and of keys"
    )


def _regions(whole: nn.Module, call: Call, columns: Collection[str], rows: Collection[str]) -> list[Region]:
    """By what is computed from what: a layer that reads parts ends a region, one that reads no parts may begin one."""
    block = part_of_block(whole, {}, 1, 0)
    seen: list[tuple[str, Any, Any]] = []
    for name, module in block.named_modules():
        if name in columns or name in rows:
            module.register_forward_hook(
                lambda _, args, result, name=name: seen.append(
                    (name, args[0].grad_fn if args else None, result.grad_fn)
                )
            )
    run(block, call)
    made: dict[Any, str] = {}  # by autograd's node, the layer whose output it is
    style: dict[str, str] = {}
    sources: dict[str, set[str]] = {}
    for name, source, result in seen:
        if name in style:
            made[result] = name
            continue
        read = {one for one in _reached(source, made) if style[one] == "colwise"}
        if read and name in rows:
            style[name], sources[name] = "rowwise", read
        elif not read and name in columns:
            style[name] = "colwise"
        else:
            continue
        made[result] = name
    found: list[tuple[set[str], set[str]]] = []
    for row, read in sources.items():
        mine = (set(read), {row})
        for other in [one for one in found if one[0] & read]:
            found.remove(other)
            mine = (mine[0] | other[0], mine[1] | other[1])
        found.append(mine)
    return [Region(tuple(sorted(ins)), tuple(sorted(outs))) for ins, outs in found]


def _reached(start: Any, made: Mapping[Any, str]) -> set[str]:
    """The layers whose outputs this node is computed from, with none of the others in between."""
    found: set[str] = set()
    seen, stack = set(), [start]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in made:
            found.add(made[node])
        else:
            stack += [source for source, _ in node.next_functions]
    return found


def _ends(
    model: nn.Module,
    example: Example,
    ranks: int,
    blocks: Sequence[str],
    order: Sequence[str],
    styles: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str]]:
    """The embedding of tokens and the head, which give whole outputs of whole inputs whatever the model does with them.

    Both or neither of what is tied; and why one is left whole.
    """
    modules = dict(model.named_modules())
    outside = [name for name in order if not any(block and name.startswith(f"{block}.") for block in blocks)]
    last = max(order.index(name) for name in (*styles, *blocks) if name in order and name)
    heads = [
        name for name in order[last:] if name in outside and type(modules[name]) is nn.Linear and name not in styles
    ]
    tables = [name for name in outside if type(modules[name]) is nn.Embedding]
    wanted: dict[str, str] = {}
    reasons: dict[str, str] = {}
    if heads and modules[heads[-1]].out_features >= modules[heads[-1]].in_features:
        wanted[heads[-1]] = "colwise_gather_output"
    if tables:
        table = max(tables, key=lambda name: modules[name].num_embeddings)
        plain = all(getattr(modules[table], key) in (None, False) for key in ("max_norm", "sparse", "padding_idx"))
        if plain and not modules[table].scale_grad_by_freq:
            wanted[table] = "embedding_rowwise"
        else:
            reasons[table] = "its options (padding_idx, max_norm, sparse) have no style"
    for name in list(wanted):
        if (size := modules[name].weight.shape[0]) % ranks:
            del wanted[name]
            reasons[name] = f"{ranks} ranks do not divide {size}"
    for name in used_by_hand(model, example, list(wanted)):
        del wanted[name]
        reasons[name] = "its weight is read by other code than its own forward"
    for name in list(wanted):
        weight = modules[name].weight
        others = [path for path, one in modules.items() if any(held is weight for held in one._parameters.values())]
        if untied := [path for path in others if path not in wanted]:
            del wanted[name]
            reasons[name] = f"it has its weight in common with {untied[0]}, which is whole"
    return wanted, reasons
