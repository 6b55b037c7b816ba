"""The keys of dictionaries that a trace went through, where Dynamo's guards do not ask for all that it read.

Dynamo asks a dictionary's keys in the order of the table below it. `OrderedDict.move_to_end` changes the order in which
keys are read, and not that table: it is asked for here. And of ``list(table)`` and ``[*table]`` it asks no keys at all
(since 2.13; 2.11 asks them). Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from fsdp_compiled.torch_private.dynamo import CommonListMethodsVariable, ConstDictVariable
from fsdp_compiled.torch_private.names import uses


def has_order(value: Any, guard_type: str) -> bool:
    """Whether this guard asks for keys that have an order of their own."""
    return guard_type == "DICT_KEYS_MATCH" and isinstance(value, OrderedDict)


@contextlib.contextmanager
def asked_of_lists() -> Iterator[None]:
    """Inside, of a dictionary that this thread's trace makes a list of, the keys are guarded."""
    if not uses("keys of lists"):
        yield
        return
    call, thread = CommonListMethodsVariable.call_method, threading.get_ident()

    def call_method(self: Any, parent: Any, name: str, args: Any, kwargs: Any) -> Any:
        for one in args if name == "extend" and threading.get_ident() == thread else ():
            if isinstance(one, ConstDictVariable) and one.source is not None:
                one.install_dict_keys_match_guard()
                parent.output.guard_on_key_order.add(one.source)
        return call(self, parent, name, args, kwargs)

    CommonListMethodsVariable.call_method = call_method
    try:
        yield
    finally:
        CommonListMethodsVariable.call_method = call


class KeyOrders:
    def __init__(self) -> None:
        self.read: list[tuple[str, Any, list[Any]]] = []  # Dynamo's name, its code, and the keys as they were

    def note(self, name: str, value: Any) -> None:
        self.read.append((name, compile(name, "<guard>", "eval"), list(value)))

    def changed(self, scope: dict[str, Any]) -> str | None:
        """Which is in another order now, by Dynamo's name; asked where Dynamo's own guards hold."""
        return next((name for name, code, keys in self.read if list(eval(code, scope)) != keys), None)
