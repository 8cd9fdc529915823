"""The kernels, each beside its launch."""
