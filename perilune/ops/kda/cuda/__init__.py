"""Stages of the KDA kernels in CUDA C++; which of them run is decided beside their Triton forms."""
