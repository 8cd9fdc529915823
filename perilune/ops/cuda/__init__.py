"""Hand-written CUDA kernels: compiled at first use without a CUDA toolkit, emulated on the CPU for tests."""

from perilune.ops.cuda.driver import CudaError
from perilune.ops.cuda.kernel import Kernel, emulated, unavailable_reason

__all__ = ["CudaError", "Kernel", "emulated", "unavailable_reason"]
