"""Kernels of mixture of experts in CUDA C++."""
