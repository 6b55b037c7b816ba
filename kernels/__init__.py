"""The package's own operators: each a torch.library operator with implementations for CPU, CUDA and fake tensors.

Installed as ``fsdp_compiled.kernels``. They are inserted into programs after differentiation, so that none of them
needs a derivative.
"""
