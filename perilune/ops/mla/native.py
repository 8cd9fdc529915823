"""Calls into the C kernels of attention: availability, outputs and pointers, no mathematics."""

from __future__ import annotations

from torch import Tensor


def why_no_attention(q_BTHK: Tensor) -> str | None:
    return "not yet"


def why_no_decode(*t: Tensor) -> str | None:
    return "not yet"
