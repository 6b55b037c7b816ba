"""``torch._dynamo``, and the tracing context of ``torch._guards``, in torch 2.11 to 2.14.

``from fsdp_compiled.torch_private.dynamo import Guard`` gives what the table of `names` has under that name, whatever
module it lies in; what each is for, and what happens without it, stands there. Where one is missing, a placeholder is
given; who uses it asks `names.uses` first.
"""

from __future__ import annotations

from typing import Any

from fsdp_compiled.torch_private.names import find, find_in, uses

cache_entries = find("torch._dynamo.eval_frame._debug_get_cache_entry_list")


def __getattr__(name: str) -> Any:
    return find_in(name, "torch._dynamo.", "torch._guards.")


def closure_vars() -> dict[str, Any]:
    """What the texts of guards call."""
    return find("torch._dynamo.guards._get_closure_vars")() if uses("names in guards") else {}  # type: ignore[no-any-return]
