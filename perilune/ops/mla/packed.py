"""Causal attention of chunks of several sequences, one behind the other, each behind a cache of its own.

    o[t] = sum over first[t] <= s <= last[t] of softmax_s(scale q[t].k[s]) v[s]

The keys of all sequences lie one behind the other as well, each sequence's at a multiple of a page, so that pages can be
copied as they are; what lies between them is not read into the result, but must be numbers. No gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from perilune.ops.choice import Choice
from perilune.ops.mla.attend import attend
from perilune.ops.mla.attend import select as select_alone
from perilune.ops.mla.cuda import attend as cuda
from perilune.ops.mla.device import LOG2E


@dataclass(frozen=True)
class CachedChunks:
    """Where queries and keys lie.

    Attributes:
        offsets: N+1 boundaries of the chunks' tokens, on the host.
        past: tokens cached before each chunk.
        begins: first key of each sequence.
        first_T, last_T: int32 `[T]`, first and last key that each query sees.
    """

    offsets: tuple[int, ...]
    past: tuple[int, ...]
    begins: tuple[int, ...]
    first_T: Tensor
    last_T: Tensor

    @staticmethod
    def of(lengths: Sequence[int], past: Sequence[int], page: int, upload: Callable[[Tensor], Tensor]) -> CachedChunks:
        """Of chunks with these lengths behind so many tokens each; keys begin at multiples of `page`. `upload` brings a tensor
        to the device."""
        sizes = torch.tensor(lengths)
        rooms = [-(-(length + before) // page) * page for length, before in zip(lengths, past, strict=True)]
        offsets, begins = tuple(accumulate(lengths, initial=0)), tuple(accumulate(rooms, initial=0))[:-1]
        first_T = torch.tensor(begins).repeat_interleave(sizes)
        shift_T = (torch.tensor(begins) + torch.tensor(past) - torch.tensor(offsets[:-1])).repeat_interleave(sizes)
        both = upload(torch.cat((first_T, shift_T + torch.arange(offsets[-1]))).int())
        return CachedChunks(offsets, tuple(past), begins, *both.chunk(2))


def select(q_THK: Tensor, k_SHK: Tensor, v_SHV: Tensor, scale: float = 1.0) -> Choice:
    """Return which implementation `attend_packed` takes for these operands, and why."""
    choice = select_alone(q_THK[None], k_SHK[None], v_SHV[None], past=1, fp32_output=False, scale=scale)
    return choice if choice.implementation in ("cuda", "triton") else Choice("torch", "`attend` of each chunk")


def attend_packed(q_THK: Tensor, k_SHK: Tensor, v_SHV: Tensor, scale: float, chunks: CachedChunks) -> Tensor:
    """Attention.

    Args:
        q_THK: `[T, H, K]` queries of all chunks.
        k_SHK, v_SHV: `[S, H, K]` and `[S, H, V]` keys and values of all sequences, those of the chunks included.
        scale: factor on q.k.
        chunks: where they lie.

    Returns:
        `[T, H, V]` in the queries' dtype; scores, softmax and sums in fp32 (fp64).
    """
    choice = select(q_THK, k_SHK, v_SHV, scale).implementation
    if choice in ("cuda", "triton"):
        q, k, v = (x[None] if x.stride(-1) == 1 else x[None].contiguous() for x in (q_THK, k_SHK, v_SHV))
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        if choice == "cuda":
            cuda.attend(q, k, v, scale * LOG2E, chunks.first_T, chunks.last_T, 0, out, None)
        else:
            from perilune.ops.mla import triton_attend

            triton_attend.forward_chunks(q, k, v, scale, chunks.first_T, chunks.last_T, out)
        return out[0]
    out = []
    for (begin, end), past, key in zip(pairwise(chunks.offsets), chunks.past, chunks.begins):
        keys, values = (x[None, key : key + past + end - begin] for x in (k_SHK, v_SHV))
        out.append(attend(q_THK[None, begin:end], keys, values, scale, past=past, fp32_output=False)[0])
    return torch.cat(out)
