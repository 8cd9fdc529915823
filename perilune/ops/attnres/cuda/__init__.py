"""Reads over depth in CUDA C++."""
