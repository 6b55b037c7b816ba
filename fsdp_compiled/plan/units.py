"""Finds the units: the submodules that are gathered together.

The default rule: every element of the model's outermost block lists is a unit, and the rest is the root unit. A block
list is a ``ModuleList``, or a ``Sequential`` of composite modules, with at least two parameter-owning modules of one
class. A parameter belongs to the innermost unit around it. A parameter that several units share belongs to the
innermost unit around all of them.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import nn

Entry = str | type[nn.Module]
Choice = Entry | Sequence[Entry] | Callable[[str, nn.Module], bool]

ROOT = "root"


def find_units(model: nn.Module, choice: Choice | None = None) -> tuple[str, ...]:
    """The names of the modules that are units, without the root.

    ``choice``: a module class, a name pattern (``*`` is one path segment, ``**`` any number of them), a sequence of
    those, or ``choice(name, module) -> bool``. Units may be nested. Raises ``ValueError`` for a pattern or class that
    matches no module with parameters, and where two entries claim the same module.
    """
    found = _unit_names(model, choice)
    if ROOT in found:
        raise ValueError(f"units: {ROOT!r} is what the rest of the model is called; rename the submodule of that name.")
    return found


def _unit_names(model: nn.Module, choice: Choice | None) -> tuple[str, ...]:
    if choice is None:
        return tuple(_blocks(model))
    named = [(name, module) for name, module in model.named_modules() if name and _has_parameters(module)]
    if isinstance(choice, str | type):
        choice = (choice,)
    if callable(choice):
        found = [name for name, module in named if choice(name, module)]
        if not found:
            raise ValueError(
                f"units={_name(choice)} matches no submodule that has parameters. It is called with (name, module) "
                f"for each of: {_sample(name for name, _ in named)}."
            )
        return tuple(found)
    claimed: dict[str, Entry] = {}
    for entry in choice:
        matched = [name for name, module in named if _matches(entry, name, module)]
        if not matched:
            raise ValueError(
                f"units: {_name(entry)} matches no submodule that has parameters. "
                f"The model has: {_sample(name for name, _ in named)}."
            )
        for name in matched:
            if name in claimed:
                raise ValueError(
                    f"units overlap: {name!r} is matched by both {_name(claimed[name])} and {_name(entry)}. "
                    "Name each submodule once."
                )
            claimed[name] = entry
    return tuple(name for name, _ in named if name in claimed)


def unit_of(names: Sequence[str], units: Iterable[str]) -> str:
    """The unit that owns the parameter of these names (several names: a tied parameter)."""
    return innermost(names, units) or ROOT


def innermost(names: Sequence[str], units: Iterable[str]) -> str | None:
    """The innermost unit, other than the root, around all these parameters or submodules. A unit is around itself."""
    known = units if isinstance(units, frozenset) else frozenset(units)
    around = [known.intersection(itertools.accumulate(name.split("."), "{}.{}".format)) - {ROOT} for name in names]
    return max(frozenset.intersection(*around), key=len, default=None)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _blocks(module: nn.Module, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        elements = [(f"{path}.{key}", element) for key, element in child.named_children() if _has_parameters(element)]
        found += [key for key, _ in elements] if _is_block_list(child) else _blocks(child, f"{path}.")
    if not prefix and _is_block_list(module):
        return [name for name, child in module.named_children() if _has_parameters(child)]
    return list(dict.fromkeys(found))


def _is_block_list(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    elements = [child for child in module.children() if _has_parameters(child)]  # a list may hold None too
    if isinstance(module, nn.Sequential) and any(next(child.children(), None) is None for child in elements):
        return False
    repeated = Counter(type(child) for child in elements)
    return any(count >= 2 for count in repeated.values())


def _matches(entry: Entry, name: str, module: nn.Module) -> bool:
    if isinstance(entry, str):
        parts = re.split(r"(\*\*|\*)", entry)
        pattern = "".join({"*": r"[^.]*", "**": r".*"}.get(part, re.escape(part)) for part in parts)
        return re.fullmatch(pattern, name) is not None
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return isinstance(module, entry)
    raise ValueError(f"units: {entry!r} is neither a module class nor a name pattern; give those, or one callable.")


def _name(entry: object) -> str:
    return repr(entry) if isinstance(entry, str) else getattr(entry, "__qualname__", repr(entry))


def _sample(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "") or "no submodules"
