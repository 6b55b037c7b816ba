"""Settings of Dynamo's that a trace asks for again and again are read once.

    config.verbose     config.__getattr__("verbose"): looks for an alias, an environment variable, a knob ...    2.5 us
    here               an entry of the module's own dictionary

C++ asks Python for two of them at each place that a guard looks at, which are fifty of a block; the tracer for one at
each step. Written for torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fsdp_compiled.torch_private.dynamo import config

ASKED = ("skip_tensor_guards_with_matching_dict_tags", "max_saved_pointers_for_recursive_dict_tags_check", "verbose")


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Inside, they are what they are now."""
    held = vars(config)
    mine = {name: getattr(config, name) for name in ASKED if name not in held and hasattr(config, name)}
    held.update(mine)
    try:
        yield
    finally:
        for name in mine:
            held.pop(name, None)
