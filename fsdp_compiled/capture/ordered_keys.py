"""The order of the keys of an `OrderedDict` that a trace went through.

Dynamo asks a dictionary's keys in the order of the table below it. `OrderedDict.move_to_end` changes the order in which
keys are read, and not that table: it is asked for here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


def has_order(value: Any, guard_type: str) -> bool:
    """Whether this guard asks for keys that have an order of their own."""
    return guard_type == "DICT_KEYS_MATCH" and isinstance(value, OrderedDict)


class KeyOrders:
    def __init__(self) -> None:
        self.read: list[tuple[str, Any, list[Any]]] = []  # Dynamo's name, its code, and the keys as they were

    def note(self, name: str, value: Any) -> None:
        self.read.append((name, compile(name, "<guard>", "eval"), list(value)))

    def changed(self, scope: dict[str, Any]) -> str | None:
        """Which is in another order now, by Dynamo's name; asked where Dynamo's own guards hold."""
        return next((name for name, code, keys in self.read if list(eval(code, scope)) != keys), None)
