"""``torch._inductor``, in torch 2.11 to 2.13: what compiles a piece, what it gives, and where that is kept.

Relied on: the settings, `standalone_compile` and its artifacts (one of which, `CompiledFxGraph`, holds the generated
code), the cache folder, the key of PyTorch's own sources and of custom passes, and what asks for the processor's
vector instructions, and compiles C++ code and its headers.
"""

import torch._inductor
from torch._inductor import codecache, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CacheBase, cache_dir, torch_key
from torch._inductor.codegen.common import custom_backend_passes
from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, VecISA, pick_vec_isa
from torch._inductor.cpu_vec_isa import _get_isa_dry_compile_fingerprint as isa_fingerprint
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.standalone_compile import CacheCompiledArtifact, CompiledArtifact

compile_alone = torch._inductor.standalone_compile  # whose name a module of the same name takes

__all__ = [
    "AsyncCompile",
    "CacheBase",
    "CacheCompiledArtifact",
    "CompiledArtifact",
    "CompiledFxGraph",
    "VecAVX2",
    "VecAVX512",
    "VecISA",
    "cache_dir",
    "codecache",
    "compile_alone",
    "config",
    "custom_backend_passes",
    "isa_fingerprint",
    "pick_vec_isa",
    "torch_key",
]
