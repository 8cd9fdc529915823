"""Speculative decoding without state snapshots: fold the drafts that were accepted, score the next ones (report §5.4.2).

A step is given the projected inputs of two windows of tokens. Those of the *pending* window were scored by the step
before; by now it is known how many of them stand, and only these enter the state and the convolution's window, in place.
The outputs of the *new* window are computed from there, and leave no trace. So a sequence keeps one state and the inputs
of one window, whatever the number of drafts, and nothing has to be undone.

    state(after m accepted of pending)  = m decode steps;    outputs(new) = T decode steps on a copy

The kernels read a state once and write it once. The CUDA kernel lets the state meet all tokens at once; for what it does not
take there is Triton's, which works through them one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice
from perilune.ops.kda.cuda import verify as cuda
from perilune.ops.kda.decode import kda_decode_step
from perilune.ops.kda.decode import readable as readable_step
from perilune.ops.kda.decode import select as select_decode
from perilune.ops.triton.available import obstacle as triton_obstacle


class Projections(NamedTuple):
    """What a KDA layer's projections make of T tokens, and all that a state update needs.

    Attributes:
        qkv_BTX: raw projections q | k | v, before the convolution.
        decay_logit_BTHK: raw decay logits.
        beta_logit_BTH: raw write-strength logits.
    """

    qkv_BTX: Tensor
    decay_logit_BTHK: Tensor
    beta_logit_BTH: Tensor

    def token(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token t of every row."""
        return self.qkv_BTX[:, t], self.decay_logit_BTHK[:, t], self.beta_logit_BTH[:, t]


def select(device: torch.device | str, dtype: torch.dtype) -> Choice:
    """Say which implementation `kda_verify_step` runs for activations of `dtype` on `device`, and why."""
    choice = select_decode(device, dtype)
    if choice.implementation == "cuda":
        return Choice("cuda", "both windows in one launch, the state meets all tokens at once")
    if choice.implementation == "triton" and triton_obstacle(torch.device(device), dtype) is None:
        return Choice("triton", "both windows in one launch, the state read and written once")
    return Choice("torch", f"a decode step a token ({choice.implementation}: {choice.reason})")


def kda_verify_step(
    new: Projections,
    gate_BTHV: Tensor,
    pending: Projections | None,
    accepted_B: Tensor | None,
    conv_weight_XW: Tensor,
    window_BXW1: Tensor,
    A_log_H: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight_V: Tensor,
    state_BHVK: Tensor,
    *,
    num_heads: int,
    key_dim: int,
    lower_bound: float | None,
    scale: float,
    norm_eps: float,
    index_B: Tensor | None = None,
) -> Tensor:
    """Advance the states by the accepted tokens of `pending`, then compute the outputs of `new`; no gradient.

    Args:
        new: the window to be scored: the last sampled token, then the drafts.
        gate_BTHV: output gate logits of `new`.
        pending: the window of the step before; None at the start, then nothing is folded.
        accepted_B: int32 or int64, how many tokens of `pending` stand, 0 to their number; None with `pending`.
        conv_weight_XW, A_log_H, dt_bias, norm_weight_V: as for `kda_decode_step`.
        window_BXW1, state_BHVK: as they were before `pending`; updated IN PLACE to after its accepted tokens.
        num_heads, key_dim, lower_bound, scale, norm_eps, index_B: as for `kda_decode_step`.

    Returns:
        `[B, T, H * V]` in the dtype of the projections.

    Raises:
        ConfigError: shapes do not fit, or a count or a slot is out of range (the kernels give NaN for such a row
            and leave its state alone).
    """
    batch, length, channels = new.qkv_BTX.shape
    value_dim = norm_weight_V.shape[0]
    if channels != num_heads * (2 * key_dim + value_dim) or conv_weight_XW.shape[0] != channels:
        raise ConfigError(
            f"qkv has {channels} channels and the convolution {conv_weight_XW.shape[0]}; "
            f"{num_heads} heads of K = {key_dim}, V = {value_dim} need {num_heads * (2 * key_dim + value_dim)}"
        )
    if (pending is None) != (accepted_B is None):
        raise ConfigError("kda_verify_step needs the pending window and the count of its accepted tokens, or neither")
    if pending is not None and (pending.qkv_BTX.shape[0], pending.qkv_BTX.shape[2]) != (batch, channels):
        raise ConfigError(
            f"pending {list(pending.qkv_BTX.shape)} and new {list(new.qkv_BTX.shape)} do not fit together"
        )
    if accepted_B is not None and (accepted_B.shape != (batch,) or accepted_B.dtype not in (torch.int32, torch.int64)):
        raise ConfigError(
            f"accepted has shape {list(accepted_B.shape)} and type {accepted_B.dtype}; {batch} rows need [{batch}] of int32 or int64"
        )
    slots = batch if index_B is None else state_BHVK.shape[0]
    taps = conv_weight_XW.shape[1]
    if state_BHVK.shape != (slots, num_heads, value_dim, key_dim) or window_BXW1.shape != (slots, channels, taps - 1):
        raise ConfigError(
            f"state {tuple(state_BHVK.shape)} and window {tuple(window_BXW1.shape)} must be "
            f"{(slots, num_heads, value_dim, key_dim)} and {(slots, channels, taps - 1)}"
        )
    if index_B is not None and (index_B.shape != (batch,) or index_B.dtype not in (torch.int32, torch.int64)):
        raise ConfigError(
            f"index has shape {list(index_B.shape)} and type {index_B.dtype}; {batch} rows need [{batch}] of int32 or int64"
        )
    if A_log_H is None and lower_bound is None:
        raise ConfigError("the softplus gate (lower_bound=None) needs A_log")
    weights = (conv_weight_XW, A_log_H, dt_bias, norm_weight_V)
    numbers = (num_heads, key_dim, lower_bound, scale, norm_eps)
    device, dtype = new.qkv_BTX.device, new.qkv_BTX.dtype
    implementation = select(device, dtype).implementation
    readable = implementation in ("cuda", "triton") and _readable(
        new, gate_BTHV, pending, weights, window_BXW1, state_BHVK
    )
    in_cuda = implementation == "cuda" and readable
    if in_cuda and cuda.unsuitable(new, gate_BTHV, pending, window_BXW1, state_BHVK, taps) is None:
        return cuda.verify_step(
            new, gate_BTHV, pending, accepted_B, *weights, window_BXW1, state_BHVK, index_B, *numbers
        )
    if readable and triton_obstacle(device, dtype) is None:
        from perilune.ops.kda.triton_verify import verify_step

        return verify_step(new, gate_BTHV, pending, accepted_B, *weights, window_BXW1, state_BHVK, index_B, *numbers)
    return _by_steps(new, gate_BTHV, pending, accepted_B, weights, window_BXW1, state_BHVK, index_B, numbers)


def _by_steps(new, gate, pending, accepted, weights, window, state, index, numbers) -> Tensor:
    """A decode step a token: in place for the pending window, on a copy for the new one."""
    conv_weight, A_log, dt_bias, norm_weight = weights
    heads, key_dim, lower_bound, scale, norm_eps = numbers
    batch, length, _ = new.qkv_BTX.shape
    slots = torch.arange(batch, device=state.device) if index is None else index.long()

    def step(token, gate_BHV, window, state, index):
        qkv, decay_logit, beta_logit = token
        return kda_decode_step(
            qkv, conv_weight, window, decay_logit, A_log, dt_bias, beta_logit, gate_BHV, norm_weight, state,
            num_heads=heads, key_dim=key_dim, lower_bound=lower_bound, scale=scale, norm_eps=norm_eps, index_B=index,
        )  # fmt: skip

    if pending is not None:
        count = pending.qkv_BTX.shape[1]
        if batch and not 0 <= int(accepted.min()) <= int(accepted.max()) <= count:
            raise ConfigError(
                f"accepted counts {accepted.tolist()}; a pending window of {count} tokens allows 0..{count}"
            )
        silent = gate.new_zeros(batch, heads, norm_weight.shape[0])  # these outputs were given by the step before
        for t in range(count):
            step(pending.token(t), silent, window, state, torch.where(accepted > t, slots, -1))
    alive = slots.clamp(min=0)
    if batch and int(alive.max()) >= state.shape[0]:
        raise ConfigError(f"index names slot {int(alive.max())} of a pool of {state.shape[0]}")
    window, state = window[alive], state[alive]
    rows = torch.where(slots >= 0, torch.arange(batch, device=state.device), -1)
    outputs = [step(new.token(t), gate[:, t], window, state, rows) for t in range(length)]
    return torch.stack(outputs, 1) if outputs else new.qkv_BTX.new_zeros(batch, 0, heads * norm_weight.shape[0])


def _readable(new: Projections, gate: Tensor, pending: Projections | None, weights, window, state) -> bool:
    """Whether the kernel can read the tensors: as for a decode step."""
    conv_weight, A_log, dt_bias, norm_weight = weights
    for part in (new, pending):
        if part is None:
            continue
        if part.qkv_BTX.shape[1] == 0 or len({x.dtype for x in part} | {gate.dtype}) > 1:
            return False
        (qkv, decay_logit, beta_logit), opened = part.token(0), gate[:, 0]
        if not readable_step(
            qkv, conv_weight, window, decay_logit, A_log, dt_bias, beta_logit, opened, norm_weight, state
        ):
            return False
    return True
