"""One read of the residual stream with what stands around it: the pending output added to the running sum before, the
RMSNorm of the next layer after.

    live = live + delta;   x = mix([*bank, live]);   x = rms_norm(x)

A stream that keeps its last sub-layer's output apart until the next read needs one pass over the sources where three
would read and write them. Where a block ends, the sum returned here is pushed to the bank as it is: a write of its own
is not needed, and no later read can change it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.attnres import fused_read
from perilune.ops.attnres.mixing import check, mix, select
from perilune.ops.choice import forced
from perilune.ops.norm import rms_norm


def read(
    bank: Sequence[Tensor],
    live: Tensor,
    delta: Tensor | None,
    score_weight_D: Tensor,
    eps: float,
    norm_weight_D: Tensor | None = None,
    norm_eps: float = 0.0,
    query_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add, mix, normalise.

    Args:
        bank: n >= 0 finished blocks [..., D], oldest first.
        live: [..., D] running sum.
        delta: [..., D] output not yet added to it; None = nothing pending.
        score_weight_D: [D], norm weight * query, as for `mix`.
        eps: of the scores' norm.
        norm_weight_D: [D] weight of an RMSNorm of the result; None = no norm.
        norm_eps: of that norm.
        query_D: [D]; then `score_weight_D` is the norm weight alone, and the two are multiplied here.

    Returns:
        The read [..., D] in live's dtype, and the running sum with delta added (live itself without delta), rounded to
        that dtype before it is scored. The forms for CUDA devices keep the mix in float32 up to the norm's result.

    Raises:
        ConfigError: shapes disagree.
    """
    if delta is not None and delta.shape != live.shape:
        raise ConfigError(
            f"the read got a running sum {list(live.shape)} and an output {list(delta.shape)}; they must have one shape"
        )
    sources = [*bank, live]
    inputs = sources if delta is None else [*sources, delta]
    # On the CPU `mix` selects; asking twice would be work done twice in every decode step.
    if not live.is_cpu or forced() in ("cuda", "triton"):
        implementation = select(inputs).implementation
        if implementation in ("cuda", "triton"):
            check(sources, score_weight_D)
            return fused_read.read(
                implementation, sources, delta, score_weight_D, eps, norm_weight_D, norm_eps, query_D=query_D
            )
    if query_D is not None:
        score_weight_D = score_weight_D * query_D
    if delta is not None:
        live = live + delta
    mixed = mix([*bank, live], score_weight_D, eps)
    return mixed if norm_weight_D is None else rms_norm(mixed, norm_weight_D, norm_eps), live
