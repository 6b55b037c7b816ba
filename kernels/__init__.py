"""Hand-written kernels, each beside the plain PyTorch it must agree with."""
