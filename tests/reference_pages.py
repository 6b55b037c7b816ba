"""docs/policy.md and docs/reference.md, made from docstrings, signatures and defaults.

``python -m tests.reference_pages --write`` writes them; tests/house/test_docs.py compares them with what the code says.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from fsdp_compiled import (
    LossScale,
    OuterSGD,
    Policy,
    Rendezvous,
    SequenceAttention,
    Sharded,
    State,
    chunked_cross_entropy,
    compile_sharded,
    load_bundle,
    stretch,
)
from fsdp_compiled.analysis.memory import Memory
from fsdp_compiled.policy import PLACEMENTS

DOCS = Path(__file__).parent.parent / "docs"
WRITTEN = "This page is written by `python -m tests.reference_pages --write` from the code's docstrings."
POLICY = f"""\
# Policy

`compile_sharded(..., policy=Policy(...))`: a frozen dataclass, one field a decision. What is wrong by itself is a
`ValueError` where the policy is made; what does not fit the model, the optimizer or the device is one of
`compile_sharded`, on every rank, before anything is changed. Ranks with different policies get an error.

{WRITTEN}
"""
REFERENCE = f"""\
# Reference

{WRITTEN} What is marked collective is called by every rank, in the same order.
"""


def policy() -> str:
    parts = [POLICY]
    documented = dict(_entries(_doc(Policy)))
    for field in fields(Policy):
        parts.append(f"## `{field.name} = {_default(field)}`\n\n{documented[field.name]}\n")
        if field.name == "shard":
            parts.append(_placements())
        if (kind := {"loss_scale": LossScale, "outer": OuterSGD, "rendezvous": Rendezvous}.get(field.name)) is not None:
            given = ", ".join(
                one.name if one.default is MISSING else f"{one.name}={one.default}" for one in fields(kind)
            )
            parts.append(f"`{kind.__name__}({given})`\n\n{_doc(kind)}\n")
    return "\n".join(parts)


def reference() -> str:
    said = _doc(compile_sharded)
    first, rest = said.split("\n\n", 1)
    arguments, errors = rest.split("\n\nRaises", 1)
    lines = [f"- `{name}`: {' '.join(text.split())}" for name, text in _entries(f"\n\n{arguments}")]
    parts = [
        REFERENCE,
        f"## `compile_sharded{_signature(compile_sharded)}`\n\n{first}\n",
        "\n".join(lines) + "\n",
        f"Raises{errors}\n",
        *_members("Sharded", Sharded),
        f"## `State`\n\n{_doc(State)}\n",
        *_members("Memory", Memory),
        *_called("SequenceAttention", SequenceAttention, SequenceAttention.forward),
        *_called("stretch", stretch),
        *_called("load_bundle", load_bundle),
        *_called("chunked_cross_entropy", chunked_cross_entropy),
    ]
    return "\n".join(parts)


PAGES: Mapping[str, Callable[[], str]] = {"policy.md": policy, "reference.md": reference}


def _members(name: str, kind: type) -> Iterator[str]:
    """A heading and a text for what the class lets people call or read, in the order of its source."""
    yield f"## `{name}`\n\n{_doc(kind)}\n"
    for member, value in [entry for one in kind.__mro__ for entry in vars(one).items()]:
        value = inspect.unwrap(value) if callable(value) else value
        if not (member.startswith("_") and member != "__call__") and _is_documented(value):
            call = f"{_signature(value, bound=True)}" if callable(value) else ""
            title = f"sharded{call}" if member == "__call__" else f"{member}{call}"
            yield f"### `{title}`\n\n{_doc(value)}\n"


def _called(name: str, made: Callable[..., Any], forward: Callable[..., Any] | None = None) -> Iterator[str]:
    """Of a function, or of a module and its ``forward``."""
    yield f"## `{name}{_signature(made)}`\n\n{_doc(made)}\n"
    if forward is not None:
        yield f"### `forward{_signature(forward, bound=True)}`\n\n{_doc(forward)}\n"


def _is_documented(value: Any) -> bool:
    return (callable(value) or isinstance(value, property)) and bool(value.__doc__)


def _signature(function: Callable[..., Any], bound: bool = False) -> str:
    """Names and defaults; the types are in the code."""
    given = [one.replace(annotation=inspect.Parameter.empty) for one in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(given[bound:]))


def _doc(documented: object) -> str:
    return (inspect.getdoc(documented) or "").replace("``", "`")


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Each entry of a docstring: a name on a line of its own, and what is indented below it."""
    for entry in re.split(r"\n(?=\w+\n    )", text.split("\n\n", 1)[1]):
        name, said = entry.strip("\n").split("\n", 1)
        yield name, inspect.cleandoc(said)


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return f"{getattr(field.default_factory, '__name__', field.default_factory)}()"
    return f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)


def _placements() -> str:
    """The placements as data, whose names are the values of ``shard``."""
    lines = ["| `shard` | parameters | gradients | optimizer state | gathered |", "|---|---|---|---|---|"]
    for name, kept in PLACEMENTS.items():
        cut = [("sharded" if one else "whole") for one in (kept.parameter, kept.gradient, kept.state)]
        gathered = "never" if not kept.parameter else "forward and backward" if kept.regather else "once a step"
        lines.append(f"| `{name}` | {' | '.join(cut)} | {gathered} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages; else they are printed")
    write = parser.parse_args().write
    for name, page in PAGES.items():
        if write:
            (DOCS / name).write_text(page())
        else:
            print(page())
