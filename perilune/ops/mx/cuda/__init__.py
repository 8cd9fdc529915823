"""Hand-written CUDA kernels of experts on MXFP4 weights."""
