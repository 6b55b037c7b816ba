"""Program -> callable: cut into pieces, compiled, captured as a CUDA graph."""
