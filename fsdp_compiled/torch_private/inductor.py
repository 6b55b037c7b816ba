"""``torch._inductor``, in torch 2.11 to 2.14: what compiles a piece, what it gives, and where that is kept.

Relied on: the settings, `standalone_compile` and its artifacts (one of which, `CompiledFxGraph`, holds the generated
code), the cache folder, the key of PyTorch's own sources and of custom passes, and what asks for the processor's
vector instructions, and compiles C++ code and its headers. Each name is in the table of `names`; where one is missing,
programs run under the eager lowering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_compiled.torch_private.names import find

I = "torch._inductor"  # noqa: E741
if TYPE_CHECKING:
    from torch._inductor.cpu_vec_isa import VecISA as VecISA
    from torch._inductor.output_code import CompiledFxGraph as CompiledFxGraph
    from torch._inductor.standalone_compile import CompiledArtifact as CompiledArtifact
else:
    CompiledArtifact = find(f"{I}.standalone_compile.CompiledArtifact")
    CompiledFxGraph = find(f"{I}.output_code.CompiledFxGraph")
    VecISA = find(f"{I}.cpu_vec_isa.VecISA")

compile_alone = find(f"{I}.standalone_compile")  # the function, whose name a module of the same name takes
AsyncCompile = find(f"{I}.async_compile.AsyncCompile")
CacheBase = find(f"{I}.codecache.CacheBase")
CacheCompiledArtifact = find(f"{I}.standalone_compile.CacheCompiledArtifact")
cache_dir = find(f"{I}.codecache.cache_dir")
codecache: Any = find(f"{I}.codecache")
config: Any = find(f"{I}.config")
custom_backend_passes = find(f"{I}.codegen.common.custom_backend_passes")
isa_fingerprint = find(f"{I}.cpu_vec_isa._get_isa_dry_compile_fingerprint")
torch_key = find(f"{I}.codecache.torch_key")
