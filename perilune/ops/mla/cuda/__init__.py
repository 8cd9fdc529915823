"""Hand-written CUDA kernels of absorbed attention."""
