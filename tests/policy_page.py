"""docs/policy.md, made from the docstrings and defaults of `Policy` and `LossScale`.

``python -m tests.policy_page --write`` writes it; tests/test_docs.py compares it with what the code says.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path

from fsdp_compiled.policy import PLACEMENTS, LossScale, Policy

PAGE = Path(__file__).parent.parent / "docs" / "policy.md"
HEAD = """\
# Policy

`compile_sharded(..., policy=Policy(...))`: a frozen dataclass, one field a decision. What is wrong by itself is a
`ValueError` where the policy is made; what does not fit the model, the optimizer or the device is one of
`compile_sharded`, on every rank, before anything is changed. Ranks with different policies get an error.

This page is written by `python -m tests.policy_page --write` from the docstring of `Policy`.
"""


def text() -> str:
    """The whole page."""
    parts = [HEAD]
    documented = dict(_described(Policy))
    for field in fields(Policy):
        parts.append(f"## `{field.name} = {_default(field)}`\n\n{_markdown(documented[field.name])}\n")
        if field.name == "shard":
            parts.append(_placements())
        if field.name == "loss_scale":
            described = _markdown(inspect.cleandoc(LossScale.__doc__ or "").split("\n\n", 1)[1])
            parts.append(f"`{_signature()}`: {described}\n")
    return "\n".join(parts)


def _described(kind: type) -> Iterator[tuple[str, str]]:
    """Each field of a docstring with what it says: a name on a line of its own, and what is indented below it."""
    for entry in re.split(r"\n(?=\w+\n    )", inspect.cleandoc(kind.__doc__ or "").split("\n\n", 1)[1]):
        name, said = entry.split("\n", 1)
        yield name, inspect.cleandoc(said)


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _default(field: Field[object]) -> str:
    if field.default_factory is not MISSING:
        return f"{getattr(field.default_factory, '__name__', field.default_factory)}()"
    return f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)


def _signature() -> str:
    return f"LossScale({', '.join(f'{field.name}={field.default}' for field in fields(LossScale))})"


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
    parser.add_argument("--write", action="store_true", help="write docs/policy.md; else it is printed")
    if parser.parse_args().write:
        PAGE.write_text(text())
    else:
        print(text())
