"""Derives a plan for tensor parallelism from a model's blocks, and tests it before it is used.

    q, k, v    colwise     a linear layer whose input all ranks have: each computes some of the outputs
    o          rowwise     one whose input is made of those outputs: each rank has a summand, which are added
    up, gate   colwise
    down       rowwise
    norms of heads, whose gradients are summands: replicated_with_grad_allreduce
    the widest embedding, and the last linear layer outside of the blocks: embedding_rowwise, colwise_gather_output

1. A copy of the model on the meta device is called with generated tokens or features, as the loss would call it.
2. Autograd's graph of a block says which layer's output goes into which. Names say nothing.
3. The block runs whole and cut on generated weights; outputs and all derivatives are compared. Copies of one batch
   stand for the ranks there: a cut layer gives each copy what its rank would have.
A layer that fails is left whole, and the plan says why. The model itself is never called and never changed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

SUMMED = "replicated_with_grad_allreduce"
ROWS, TIME = 3, 5  # sizes that no number of heads or ranks is likely to be
TOLERANCE = 1e-3  # of a tensor's norm; a wrong cut is off by its order
NOISE = 1e-5  # of the largest gradient's norm; gradients that are only rounding (a key's bias) count as equal
CURE = (
    "A number of heads, or a width, that the code takes for the whole is 1 / {ranks} of it on a rank: write -1 for it "
    "in view, reshape and split, and let {ranks} divide the heads of queries and of keys. Several things in one layer "
    "(q, k and v, or gate and up), which a cut would mix: make each an nn.Linear of its own"
)
Loss = Callable[..., Any] | None
Call = tuple[tuple[Any, ...], dict[str, Any]]  # of a module's forward; tensors are on the meta device


@dataclass(frozen=True)
class Derived:
    """``styles`` by module name; ``left``: the layers that stay whole on every rank though others like them are cut,
    and why; ``alone``: the linear layers that begin and end no cut region."""

    styles: Mapping[str, str]
    left: tuple[str, ...]
    alone: tuple[str, ...]


def derive(model: nn.Module, loss: Loss, ranks: int) -> Derived:
    """Derives a plan. Raises ``ValueError``, with nothing changed, if no call works or nothing can be cut."""
    calls, by_hand = _calls(model, loss)
    modules = dict(model.named_modules())  # a module in several places appears once
    reasons = dict.fromkeys(by_hand, "its weight is read by other code than its own forward")
    blocks = [name for name in _blocks(model) if name in calls] or [""]
    known: dict[Any, tuple[dict[str, str], dict[str, str]]] = {}
    styles: dict[str, str] = {}
    for block in blocks:
        within = f"{block}." if block else ""
        fixed = {name.removeprefix(within) for name in by_hand if name.startswith(within)}
        key = (_key(modules[block], calls[block]), *fixed)
        if key not in known:
            known[key] = _of_block(modules[block], calls[block], fixed, ranks)
        found, why = known[key]
        styles |= {within + name: style for name, style in found.items()}
        reasons = {within + name: one for name, one in why.items()} | reasons
    if not styles:
        raise ValueError(
            f"none of the model's linear layers could be cut. {' '.join(_told(reasons, modules)) or 'It has none.'}"
        )
    ends, why = _ends(model, ranks, blocks, list(calls), by_hand)
    told = {*styles, *ends, *reasons, *why}
    rest = {name: "" for name, one in modules.items() if isinstance(one, nn.Linear) and name not in told}
    left = {name: why for name, why in (reasons | why).items() if isinstance(modules[name], nn.Linear | nn.Embedding)}
    return Derived(styles | ends, tuple(_told(left, modules)), tuple(patterns(rest, modules)))


def patterns(styles: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The same by patterns: ``layers.*.up`` stands for that layer of all blocks, if they have one style."""

    def pattern(name: str) -> str:
        return ".".join("*" if part.isdigit() else part for part in name.split("."))

    found: dict[str, str] = {}
    for name, style in styles.items():
        alike = {styles.get(other) for other in names if pattern(other) == pattern(name)}
        found[pattern(name) if len(alike) == 1 else name] = style
    return found


def _told(reasons: Mapping[str, str], modules: Mapping[str, nn.Module]) -> list[str]:
    """A line for each reason, with the modules that it keeps whole."""
    found: dict[str, list[str]] = {}
    for name, why in patterns(reasons, modules).items():
        found.setdefault(why, []).append(name)
    return [f"left whole on every rank along tp: {', '.join(names)}: {why}" for why, names in found.items()]


def _blocks(module: nn.Module, prefix: str = "") -> list[str]:
    """The elements of the outermost lists whose modules contain other modules. Experts are inside of such elements."""
    found: list[str] = []
    for name, child in module.named_children():
        elements = {key: one for key, one in child.named_children() if next(one.parameters(), None) is not None}
        composite = elements and all(next(one.children(), None) is not None for one in elements.values())
        if isinstance(child, nn.ModuleList | nn.Sequential) and composite:
            found += [f"{prefix}{name}.{key}" for key in elements]
        else:
            found += _blocks(child, f"{prefix}{name}.")
    return found


def _key(block: nn.Module, call: Call) -> Any:
    """A key, equal for blocks that share one trial: those of the same classes, attributes, hooks, shapes and inputs."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.shape, value.dtype, value.requires_grad
        return value if isinstance(value, int | float | str | None) else id(value)

    said: list[Any] = [type(one) for one in block.modules()]
    for name, module in block.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        said += [(name, key, of(value)) for key, value in held.items() if key not in vars(nn.Module())]
        said += [module.training, *map(id, hooks)]
    leaves, tree = pytree.tree_flatten(call)
    return (*said, str(tree), *(of(one) if isinstance(one, torch.Tensor) else repr(one) for one in leaves))


# A call of the model.


def _copied(module: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the module in which ``replacement`` replaces each tensor that it or a module inside of it holds."""
    memo: dict[int, Any] = {}
    for inner in module.modules():
        for value in (*inner._parameters.values(), *inner._buffers.values(), *vars(inner).values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = replacement(value)
    return copy.deepcopy(module, memo)


class _Reads(TorchFunctionMode):
    """Finds modules whose weights other code reads. ``owners``: module names by the weight's identity."""

    def __init__(self, owners: Mapping[int, set[str]]) -> None:
        super().__init__()
        self.owners, self.inside, self.by_hand = owners, [""], set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in args if isinstance(result, torch.Tensor) else ():
            if self.inside[-1] not in (names := self.owners.get(id(one), {self.inside[-1]})):
                self.by_hand |= names
        return result


def _calls(model: nn.Module, loss: Loss) -> tuple[dict[str, Call], set[str]]:
    """The first call of each module, in the order of these calls; and the layers whose weights other code reads.

    Raises ``ValueError`` if no generated call works, with the error of the first one.
    """

    def empty(value: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(value.detach(), device="meta")  # frozen ones may be trained later
        return nn.Parameter(made, made.is_floating_point()) if isinstance(value, nn.Parameter) else made

    first: Exception | None = None
    for batch in _batches(model, loss):
        made, found, owners = _copied(model, empty), dict[str, Call](), dict[int, set[str]]()
        reads = _Reads(owners)
        for name, module in made.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                owners.setdefault(id(module.weight), set()).add(name)

            def before(
                _: Any, args: Any, kwargs: Any, name: str = name, found: Any = found, reads: Any = reads
            ) -> None:
                found.setdefault(name, (args, kwargs))
                reads.inside.append(name)

            def after(*_: Any, reads: Any = reads) -> None:
                reads.inside.pop()

            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]), reads:
                made(*batch) if loss is None else loss(made, *batch)
        except Exception as error:
            first = first or error
        else:
            return found, reads.by_hand
    what = "the loss" if loss is not None else type(model).__name__
    raise ValueError(
        f"it is derived from a call of the model on generated inputs, and {what} could not be called with any "
        f"(tokens or features, [{ROWS}, {TIME}] rows and positions). With the first: {type(first).__name__}: {first}"
    )


def _batches(model: nn.Module, loss: Loss) -> Iterator[tuple[torch.Tensor, ...]]:
    """Guesses batches: tokens, or features of the first layer's width; targets like these, or a class per row."""
    linear = next((one for one in model.modules() if isinstance(one, nn.Linear)), None)
    tokens = torch.zeros(ROWS, TIME, dtype=torch.int64, device="meta")
    first = [tokens]
    if linear is not None:
        first += [torch.empty(ROWS, *time, linear.in_features, device="meta") for time in ((TIME,), ())]
    if not any(isinstance(one, nn.Embedding) for one in model.modules()):
        first = first[1:] + first[:1]
    parameters = list(inspect.signature(model.forward if loss is None else loss).parameters.values())
    taken = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    must = sum(one.default is one.empty for one in taken) - (loss is not None)
    for count, one in itertools.product([must] if must > 0 else [2, 1], first):
        yield from ((one, *[other] * (count - 1)) for other in ([one] if count == 1 else [one, tokens, tokens[:, 0]]))


# A block, whole and cut.


def _of_block(block: nn.Module, call: Call, fixed: set[str], ranks: int) -> tuple[dict[str, str], dict[str, str]]:
    """Styles that passed the trial, by name in the block; and why the other linear layers are left whole."""
    layers = {name: one for name, one in block.named_modules() if name and type(one) is nn.Linear and name not in fixed}
    columns = {name for name, one in layers.items() if one.out_features % ranks == 0}
    rows = {name for name, one in layers.items() if one.in_features % ranks == 0}
    reasons = dict.fromkeys({*layers} - columns - rows, f"{ranks} ranks divide neither its inputs nor its outputs")
    whole = generated(block)
    try:
        true = run(whole, call, dict.fromkeys(columns | rows, ""), 1)
    except Exception as error:
        return {}, dict.fromkeys(layers, f"it could not be tried: {type(error).__name__}: {error}")
    while True:
        regions = _regions(true.seen, columns, rows)
        styles = {name: style for region in regions for name, style in region.items()}
        failure, norms = tried(whole, true, call, styles, ranks)
        if failure is None:
            return styles | dict.fromkeys(norms, SUMMED), {k: why for k, why in reasons.items() if k not in styles}
        alone = [(region, tried(whole, true, call, region, ranks)[0]) for region in regions]
        for region, why in [one for one in alone if one[1]] or [(one, failure) for one in regions]:
            columns -= {name for name, style in region.items() if style == "colwise"}
            why = f"cut over {ranks} ranks, {why}. {CURE.format(ranks=ranks)}"
            reasons = dict.fromkeys(region, why) | reasons


class Results(NamedTuple):
    """``inputs``, ``weights``: derivatives of a product of the outputs. ``seen``: for each call of a layer that may be
    cut, its name, and autograd's nodes of its input and output."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor | None]
    weights: dict[str, torch.Tensor | None]
    seen: list[tuple[str, Any, Any]]
    names: dict[int, str]  # of weights by their identity; whose nodes autograd keeps


def generated(block: nn.Module) -> Any:
    """A copy of the block on the CPU, with generated weights in float32; buffers keep their values, if they have any.

    The same on every rank. In eval mode, so that nothing is dropped.
    """
    generator = torch.Generator().manual_seed(0)

    def numbers(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, nn.Parameter):
            return _filled(value, generator, 2) if value.is_meta else value.detach().cpu().clone()
        if not value.is_floating_point():
            return nn.Parameter(_filled(value, generator, 2), requires_grad=False)
        drawn = torch.randn(value.shape, generator=generator)
        return nn.Parameter(drawn * value.shape[-1] ** -0.5 if value.dim() > 1 else 1 + drawn / 4)

    return _copied(block, numbers).eval()


def _filled(value: torch.Tensor, generator: torch.Generator, below: int) -> torch.Tensor:
    """A tensor like it on the CPU: normal floats, integers smaller than ``below``, or masks that are all True."""
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator)
    if value.dtype == torch.bool:
        return torch.ones(value.shape, dtype=torch.bool)
    return torch.randint(0, below, value.shape, generator=generator).to(value.dtype)


def run(whole: nn.Module, call: Call, styles: Mapping[str, str], ranks: int, like: Results | None = None) -> Results:
    """Runs forward on generated inputs, and backward of its product with generated numbers.

    ``like``: the results of the whole block. If given, the batch is there once for each rank: ``colwise`` gives each
    copy the outputs of its rank; ``rowwise`` adds the copies' results, and all get the sum. So autograd's gradient of a
    weight is the sum over the ranks. Raises ``ValueError`` if the copies of an output differ.
    """
    block = copy.deepcopy(whole)
    seen: list[tuple[str, Any, Any]] = []
    for name, style in styles.items():
        module: Any = block.get_submodule(name)

        def forward(value: Any, module: Any = module, name: str = name, style: str = style) -> Any:
            result = _as_ranks(module, value, style, ranks) if like else F.linear(value, module.weight, module.bias)
            seen.append((name, value.grad_fn, result.grad_fn))
            return result

        module.forward = forward
    generator = torch.Generator().manual_seed(1)
    below = min([one.num_embeddings for one in block.modules() if isinstance(one, nn.Embedding)], default=2)
    leaves: list[torch.Tensor] = []

    def given(value: torch.Tensor) -> torch.Tensor:
        made = _filled(value, generator, below)
        if value.requires_grad:
            leaves.append(made.requires_grad_())
        batch = next((dim for dim, size in enumerate(value.shape) if size in (ROWS, ROWS * TIME)), None)
        return made.clone() if batch is None or not like else torch.cat([made] * ranks, batch)  # may be written to

    args, kwargs = pytree.tree_map_only(torch.Tensor, given, call)
    with torch.enable_grad():
        outputs = [one for one in pytree.tree_leaves(block(*args, **kwargs)) if isinstance(one, torch.Tensor)]
        known = seen[:]  # backward of a checkpoint calls the layers again
        if like is not None:
            outputs = [_one_copy(*pair) for pair in zip(outputs, like.outputs, strict=True)]
        differentiable = [one for one in outputs if one.is_floating_point() and one.requires_grad]
        if not differentiable:
            raise TypeError("it returns nothing that can be differentiated")
        sum((one * torch.randn(one.shape, generator=generator)).sum() for one in differentiable).backward()
    weights = dict(block.named_parameters())
    gradients = {name: one.grad for name, one in weights.items()}
    own = {id(one): name for name, one in weights.items()}
    return Results(outputs, [one.grad for one in leaves], gradients, known, own)


def _as_ranks(module: nn.Linear, value: torch.Tensor, style: str, ranks: int) -> torch.Tensor:
    batch = next(dim for dim, size in enumerate(value.shape) if size % ranks == 0)
    copies, bias = value.chunk(ranks, batch), module.bias
    if style == "colwise":
        biases = [None] * ranks if bias is None else bias.chunk(ranks)
        parts = zip(copies, module.weight.chunk(ranks), biases, strict=True)
        return torch.cat([F.linear(*part) for part in parts], batch)
    summands = [F.linear(*part) for part in zip(copies, module.weight.chunk(ranks, 1), strict=True)]
    total = sum(summands[1:], summands[0])
    return torch.cat([total if bias is None else total + bias] * ranks, batch)


def _one_copy(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    batch = next((dim for dim, size in enumerate(like.shape) if value.shape[dim] != size), None)
    copies = [value] if batch is None else value.split(like.shape[batch], batch)
    if not all(_same(one, like) for one in copies):
        raise ValueError("it gives another result")
    return copies[0]


def _same(mine: torch.Tensor | None, true: torch.Tensor | None, noise: float = 0.0) -> bool:
    if mine is None or true is None:
        return mine is true
    if mine.shape != true.shape or not true.is_floating_point():
        return torch.equal(mine, true)
    return bool((mine - true).norm() <= TOLERANCE * true.norm() + noise)


def tried(
    whole: nn.Module, true: Results, call: Call, styles: Mapping[str, str], ranks: int
) -> tuple[str | None, set[str]]:
    """Why the block gives other results if cut by these styles, or None; and the norms whose gradients are summands.

    ``whole``: a `generated` copy; ``true``: its results.
    """
    try:
        mine = run(whole, call, styles, ranks, true)
    except Exception as error:
        return f"on parts it fails: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", set()
    noise = NOISE * max([one.norm().item() for one in true.weights.values() if one is not None], default=0.0)
    weights = all(_same(mine.weights[name], one, noise) for name, one in true.weights.items())
    if not weights or not all(_same(*pair, noise) for pair in zip(mine.inputs, true.inputs, strict=True)):
        return "it has other derivatives on parts", set()
    return _summed(whole, mine, styles)


def _summed(whole: nn.Module, found: Results, styles: Mapping[str, str]) -> tuple[str | None, set[str]]:
    """Checks parameters on the way from ``colwise`` to ``rowwise``: each rank has only a summand of their gradients.
    That is allowed for norms of heads, if they are used nowhere else."""
    made = {result: name for name, _, result in found.seen}
    starts = [source for name, source, _ in found.seen if styles[name] == "rowwise"]
    others = [one.grad_fn for one in found.outputs] + [one for name, one, _ in found.seen if styles[name] == "colwise"]
    inside, outside = (_leaves(nodes, made, found.names) for nodes in (starts, others))
    paths = {name.rpartition(".")[0] for name in inside}
    for path in paths:
        module = whole.get_submodule(path)
        held = {f"{path}.{key}" for key, _ in module.named_parameters()}
        plain = path and not list(module.children()) and not isinstance(module, nn.Linear | nn.Embedding)
        if not plain or held - inside or held & outside:
            return f"each rank would have a summand of the gradient of {path or 'its input'}", set()
    return None, paths


def _walked(nodes: list[Any], made: Mapping[Any, str]) -> Iterator[Any]:
    """Autograd's nodes that these are computed from, as far back as those in ``made``."""
    seen, stack = set[Any](), list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack += [] if node in made else [source for source, _ in node.next_functions]


def _leaves(nodes: list[Any], made: Mapping[Any, str], names: Mapping[int, str]) -> set[str]:
    """Names of the parameters that these are computed from; other leaves have the empty name."""
    return {names.get(id(one.variable), "") for one in _walked(nodes, made) if hasattr(one, "variable")}


def _regions(seen: list[tuple[str, Any, Any]], columns: Collection[str], rows: Collection[str]) -> list[dict[str, str]]:
    """Groups layers by data flow: one that reads parts ends a region, one that reads none may begin a region."""
    made: dict[Any, str] = {}  # by autograd's node, the layer whose output it is
    style: dict[str, str] = {}
    regions: list[dict[str, str]] = []
    for name, source, result in seen:
        if name not in style:
            read = {made[one] for one in _walked([source], made) if one in made and style[made[one]] == "colwise"}
            if not (name in rows if read else name in columns):
                continue
            style[name] = "rowwise" if read else "colwise"
            if read:
                mine = dict.fromkeys(read, "colwise") | {name: "rowwise"}
                for other in [one for one in regions if read & one.keys()]:
                    regions.remove(other)
                    mine |= other
                regions.append(mine)
        made[result] = name
    return regions


def _ends(
    model: nn.Module, ranks: int, blocks: list[str], order: list[str], by_hand: set[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Styles for the token embedding and the head. They turn whole inputs into whole outputs whatever the model does.

    Tied modules are both cut, or neither. Also returns why one is left whole.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    outside = [name for name in order if not any(name.startswith(f"{block}.") or block == "" for block in blocks)]
    last = max(order.index(name) for name in blocks)
    tables = [name for name in outside if type(modules[name]) is nn.Embedding]
    heads = [name for name in outside if type(modules[name]) is nn.Linear and order.index(name) > last]
    wanted: dict[str, str] = {}
    reasons: dict[str, str] = {}
    if heads and modules[heads[-1]].out_features >= modules[heads[-1]].in_features:
        wanted[heads[-1]] = "colwise_gather_output"
    if tables:
        wanted[max(tables, key=lambda name: modules[name].num_embeddings)] = "embedding_rowwise"
    for name in [one for one in wanted if one not in by_hand]:
        if getattr(modules[name], "padding_idx", None) is not None or any(
            getattr(modules[name], key, None) for key in ("max_norm", "sparse", "scale_grad_by_freq")
        ):
            reasons[name] = "its options (padding_idx, max_norm, sparse, scale_grad_by_freq) have no style"
        elif (size := modules[name].weight.shape[0]) % ranks:
            reasons[name] = f"{ranks} ranks do not divide {size}"
    wanted = {name: style for name, style in wanted.items() if name not in {*reasons, *by_hand}}
    for name in list(wanted):
        tied = [path for path, one in modules.items() if getattr(one, "weight", None) is modules[name].weight]
        if untied := [path for path in tied if path not in wanted]:
            del wanted[name]
            reasons[name] = f"it has its weight in common with {untied[0]}, which is whole"
    return wanted, reasons
