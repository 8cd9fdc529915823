"""KDA's GPU kernels in Triton, for Hopper GPUs, and their launch settings. `ops.kda.gpu` runs them."""
