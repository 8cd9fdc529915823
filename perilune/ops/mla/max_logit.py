"""The largest attention logit of each head, exactly: what QK-clip reads (training, §2.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.segments import Segments

CHUNK_TOKENS = 256  # queries at a time


@torch.no_grad()
def max_logit(q_BTHK: Tensor, k_BSHK: Tensor, scale: float, segments: Segments | None = None, past: int = 0) -> Tensor:
    """Return `[H]`, max over rows and causal (query, key) pairs of scale q.k, in fp32 (fp64); no gradient.

    Args:
        q_BTHK: `[B, T, H, K]` queries.
        k_BSHK: `[B, S, H, K]` keys, S = past + T.
        scale: softmax scale, as in `attend`.
        segments: packed documents; pairs across documents do not count.
        past: tokens cached before the first query.
    """
    tokens, heads = q_BTHK.shape[1:3]
    wide = torch.promote_types(q_BTHK.dtype, torch.float32)
    most_H = torch.full((heads,), -torch.inf, dtype=wide, device=q_BTHK.device)
    ids_BT = None if segments is None else segments.segment_id_BT
    key_index_S = torch.arange(k_BSHK.shape[1], device=q_BTHK.device)
    keys_BHKS = k_BSHK.to(wide).permute(0, 2, 3, 1)
    for begin in range(0, tokens, CHUNK_TOKENS):
        end = min(begin + CHUNK_TOKENS, tokens)
        seen = past + end  # keys beyond the chunk's last query are in everyone's future
        hidden_TS = key_index_S[:seen] > past + key_index_S[begin:end, None]
        if ids_BT is not None:
            hidden_TS = (hidden_TS | (ids_BT[:, begin:end, None] != ids_BT[:, None, :seen]))[:, None]
        query_BHTK = q_BTHK[:, begin:end].to(wide).transpose(1, 2)
        score_BHTS = torch.matmul(query_BHTK, keys_BHKS[..., :seen]).masked_fill_(hidden_TS, -torch.inf)
        most_H = torch.maximum(most_H, score_BHTS.amax((0, 2, 3)) * scale)
    return most_H
