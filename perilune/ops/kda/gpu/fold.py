"""From the effects of segments to the states between them: in CUDA where that kernel takes the call, else in Triton."""

from __future__ import annotations

from torch import Tensor

from perilune.ops.kda.cuda import fold as cuda_fold
from perilune.ops.kda.gpu.plan import Plan
from perilune.ops.kda.triton import configs
from perilune.ops.kda.triton.segments import fold_kernel

ROWS = 32  # value channels of a program in Triton


def fold(
    M: Tensor, N: Tensor, state: Tensor | None, strides: tuple[int, ...], p: Plan, out: Tensor, *, reverse: bool
) -> None:  # fmt: skip
    """Fill `out` `[units, heads, V, K]` with the state that enters every unit, or in reverse leaves it.

    Args:
        M: `[units, heads, K, K]`, with N `[units, heads, V, K]` what `summary` found, or the scan in reverse.
        state: of each sequence, by strides (row, head, V, K); None = zeros.
        p: units and sequences.
        out: float32, as the others.
    """
    heads, value_dim, key_dim = N.shape[1:]
    if cuda_fold.unsuitable(key_dim, value_dim, N.device, reverse) is None:
        launch = cuda_fold.laid_out(N.device, heads, value_dim, key_dim, p, strides, reverse)
        launch(M, N, state, p.sequences, out)
        return
    width = min(ROWS, value_dim)
    fold_kernel[(heads * (value_dim // width), len(p.sequences))](
        M, N, state, p.sequences, out, *strides, heads,
        K=key_dim, V=value_dim, BV=width, HAS_STATE=state is not None, REVERSE=reverse, **configs.FOLD,
    )  # fmt: skip
