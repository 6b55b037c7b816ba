"""``torch._functorch``: AOTAutograd, its settings, and what it says of each input and output of a joint graph.

The descriptors are there since torch 2.9, and are the same in 2.11 to 2.14. Each name is in the table of `names`.
"""

from typing import Any

from fsdp_compiled.torch_private.names import find

aot_module_simplified = find("torch._functorch.aot_autograd.aot_module_simplified")
config: Any = find("torch._functorch.config")
descriptors: Any = find("torch._functorch._aot_autograd.descriptors")
