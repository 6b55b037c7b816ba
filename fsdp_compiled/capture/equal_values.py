"""Values that are equal and not the same: 0.0 and -0.0; (2, 1) and (2.0, True); keys 1 and 1.0 of a dictionary.

Dynamo asks whether a value is the one that it was by ``==``, and by its class. What that lets through is asked here, by
how it is written: zeros, and numbers inside of tuples, sets and keys. Where a trace read none of these, nothing is.
"""

from __future__ import annotations

import re
from types import CodeType
from typing import Any

from torch import nn

KEYS = "DICT_KEYS_MATCH"
BY_EQUALITY = ("CONSTANT_MATCH", "EQUALS_MATCH", "CONSTANT_SUBCLASS_MATCH")
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
OF_A_MODULE = re.compile(r"(.*)(?:\.__dict__\['\w+'\]|\.\w+)$")  # in Dynamo's names


def has_equals(value: Any, guard_type: str) -> bool:
    """Whether this guard holds for another value too."""
    if guard_type == KEYS:
        return any(map(_has_number, value))
    if guard_type not in BY_EQUALITY:
        return False
    if isinstance(value, complex):
        return value.real == 0 or value.imag == 0
    return value == 0 if isinstance(value, float) else not isinstance(value, int) and _has_number(value)


def _has_number(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return any(map(_has_number, value))
    return isinstance(value, int | float | complex)


class EqualValues:
    def __init__(self) -> None:
        self.read: dict[str, tuple[str, str]] = {}  # by Dynamo's name: how it was written, and the code that reads it
        self._all: tuple[CodeType, str] | None = None

    def note(self, name: str, value: Any, guard_type: str) -> None:
        self.read[name] = (repr(list(value)), f"list({name})") if guard_type == KEYS else (repr(value), name)

    def changed(self, scope: dict[str, Any]) -> str | None:
        """Which is written otherwise now, by Dynamo's name; asked where Dynamo's own guards hold."""
        if self._all is None:  # one expression
            self.read = {name: one for name, one in self.read.items() if not _means_nothing(name, scope)}
            texts = [", ".join(one) for one in zip(*self.read.values(), strict=True)] or ["", ""]
            self._all = compile(f"[{texts[1]}]", "<guard>", "eval"), f"[{texts[0]}]"
        code, expected = self._all
        now = eval(code, scope)
        if repr(now) == expected:
            return None
        both = zip(self.read.items(), now, strict=True)
        return next((name for (name, (was, _)), one in both if repr(one) != was), None)


def _means_nothing(name: str, scope: dict[str, Any]) -> bool:
    """Sizes of PyTorch's own modules, and the probability of a Dropout: most models have many."""
    owner = None
    if (found := OF_A_MODULE.match(name)) is not None:
        owner = eval(found[1], scope)
    if not isinstance(owner, nn.Module) or not type(owner).__module__.startswith("torch.nn."):
        return False
    return isinstance(owner, DROPOUTS) or isinstance(eval(name, scope), tuple)
