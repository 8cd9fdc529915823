"""Launch settings, fixed: no autotuning, so the first step costs one compilation a kernel whatever the head count.

Each setting that can be chosen here is run by tests/gpu.
"""

from __future__ import annotations


def launch(num_warps: int, num_stages: int = 1) -> dict[str, int]:
    """Warps of a program, and stages of its software pipeline."""
    return {"num_warps": num_warps, "num_stages": num_stages}


PREPARE = launch(8)
SCAN = (launch(4, 2), launch(8, 3))  # up to 64 value channels a program, more
SCAN_EXPORTS = (launch(4, 2), launch(8, 2))  # with states that leave it, three stages take too much shared memory
SCAN_BACKWARD = (launch(4, 2), launch(8, 2))
BACKWARD = launch(8)
PAIRS = launch(8)
PRODUCTS = launch(8)
GRADIENTS = launch(8)
SLAB = (
    1024  # programs of the three steps between whose launches the pieces (112 kB a program at K = 128) are handed over
)
SUMMARY = launch(4, 2)
SUMMARY_BLOCK = 64  # columns of a program; 128 in 8 warps reads half as much and takes as long (docs/kernels-log.md)
FOLD = launch(8, 2)
