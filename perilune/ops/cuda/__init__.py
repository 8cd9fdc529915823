"""Hand-written CUDA kernels: compiled at first use without a CUDA toolkit, emulated on the CPU for tests."""

from perilune.ops.cuda.driver import CudaError
from perilune.ops.cuda.kernel import Kernel, Launch, emulated, unavailable_reason

__all__ = ["CudaError", "Kernel", "Launch", "emulated", "unavailable_reason"]
