"""``torch._inductor``, in torch 2.11 to 2.14: what compiles a piece, what it gives, and where that is kept.

Relied on: the settings, `standalone_compile` and its artifacts (one of which, `CompiledFxGraph`, holds the generated
code), the cache folder, the key of PyTorch's own sources and of custom passes, and what asks for the processor's
vector instructions, and compiles C++ code and its headers. Each is found under its own name in the table of `names`;
where one is missing, programs run under the eager lowering.
"""

from __future__ import annotations

from typing import Any

from fsdp_compiled.torch_private.names import find, find_in

compile_alone = find("torch._inductor.standalone_compile")  # the function, not the module of the same name
isa_fingerprint = find("torch._inductor.cpu_vec_isa._get_isa_dry_compile_fingerprint")


def __getattr__(name: str) -> Any:
    return find_in(name, "torch._inductor.")
