"""Forms of calls that were made before, found again by all that decides how a call is run. Imports no Triton."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from perilune.ops.choice import forced

KEPT = 256  # forms; the oldest is dropped
ALIGNMENT = 15  # bits of an address that must be 0, where kernels copy 16 bytes at a time

Known = Callable[..., tuple[Any, ...]]
_known: dict[Hashable, Known | None] = {}


def key_of(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    state: Tensor | None, *options: Hashable,
) -> Hashable:  # fmt: skip
    """Equal for calls that are checked, chosen and launched in the same way: sizes, strides, types, devices, what the
    addresses leave over, whether gradients are wanted, and the options."""
    grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or g.requires_grad
        or beta.requires_grad
        or (A_log is not None and A_log.requires_grad)
        or (dt_bias is not None and dt_bias.requires_grad)
        or (state is not None and state.requires_grad)
    )
    return (
        q.shape, k.shape, v.shape, g.shape, beta.shape,
        q.stride(), k.stride(), v.stride(), g.stride(), beta.stride(),
        q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype,
        q.get_device(), k.get_device(), v.get_device(), g.get_device(), beta.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | g.data_ptr()) & ALIGNMENT,
        None if A_log is None else (A_log.shape, A_log.stride(), A_log.dtype, A_log.get_device()),
        None if dt_bias is None else
        (dt_bias.shape, dt_bias.stride(), dt_bias.dtype, dt_bias.get_device(), dt_bias.data_ptr() & ALIGNMENT),
        None if state is None else (state.shape, state.stride(), state.dtype, state.get_device()),
        grad, forced(), options,
    )  # fmt: skip


def find(key: Hashable) -> Known | None:
    """How to run a call with this key: given q, k, v, g, beta, A_log, dt_bias and the initial state, it returns o, the final state
    and what else the caller remembered it for. None if there is no such way."""
    return _known.get(key)


def is_decided(key: Hashable) -> bool:
    """Whether `remember` was called for this key."""
    return key in _known


def remember(key: Hashable, form: Known | None) -> None:
    """From now on `find` returns this."""
    if len(_known) >= KEPT:
        _known.pop(next(iter(_known)), None)
    _known[key] = form


def forget() -> None:
    """Forget all forms: for tests that change what is chosen."""
    _known.clear()
