"""KDA's GPU kernels in CUDA C++, a module of the same name beside each: for which calls it runs, and its launch."""
