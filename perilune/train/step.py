"""One optimizer step: a function of model, optimizer and micro-batches.

    nats/token over *all* valid tokens of the step → backward, micro-batch by micro-batch → global norm → clip
    → Muon and AdamW → QK-clip → balancers move the routers' biases

The loss is divided by the step's valid tokens before the backward pass, so neither the number of micro-batches nor how
the valid tokens fall into them changes a gradient. Biases move once a step, after the weights, from what the step's own
forward passes counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from perilune.data.loader import Batch
from perilune.model.mla import GatedMLA
from perilune.model.transformer import LossOutput, Transformer
from perilune.ops.segments import Segments
from perilune.optim.build import Optimizer
from perilune.optim.qk_clip import clip_
from perilune.train.nonfinite import DivergedError, first_bad, first_bad_activation


class StepResult(NamedTuple):
    """What a step did.

    Attributes:
        loss: nats per valid token, before the update.
        tokens: valid targets.
        grad_norm: global L2 norm before clipping, each parameter once.
        counts_LE: int64 `[moe layers, E]`, tokens sent to each expert; `[0, 0]` without experts.
        clipped_heads: MLA heads that QK-clip scaled down.
        max_logit: largest pre-softmax logit of any MLA head in this step; None if not tracked.
    """

    loss: float
    tokens: int
    grad_norm: float
    counts_LE: Tensor
    clipped_heads: int
    max_logit: float | None


def split_rows(batch: Batch, tokens: int) -> list[Batch]:
    """Cut a batch into micro-batches of whole rows with at most `tokens` tokens each (at least one row)."""
    return batch.split(max(1, tokens // batch.ids_BT.shape[1]))


def mla_layers(model: Transformer) -> list[tuple[int, GatedMLA]]:
    """(layer number, mixer) of the MLA layers."""
    return [(i, block.mixer) for i, block in enumerate(model.layers) if isinstance(block.mixer, GatedMLA)]


def batch_loss(model: Transformer, micro: Batch) -> LossOutput:
    """Forward pass of a micro-batch, images included."""
    device = model.device
    segments = Segments.from_starts(micro.starts_BT.to(device))
    images = micro.image_batch()
    return model.loss(
        micro.ids_BT.to(device),
        micro.targets_BT.to(device),
        segments,
        images=None if images is None else images.to(device),
    )


def _stop(model: Transformer, loss: float, micro: Batch) -> DivergedError:
    """The error for a loss that is not finite: the first bad weight, else the first bad activation."""
    where = first_bad(model.state_dict().items())
    if where is None:
        where = first_bad_activation(model, lambda: batch_loss(model, micro))
    return DivergedError(f"the loss is {loss}; first tensor that is not finite: {where or 'the loss itself'}")


def train_step(
    model: Transformer,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    *,
    factor: float,
    grad_clip: float = 1.0,
    qk_clip: float = 100.0,
) -> StepResult:
    """Do one optimizer step.

    Args:
        model: in training mode; gradients are empty before and after.
        optimizer: over the model's parameters.
        micro_batches: the step's tokens; one forward and backward each.
        factor: of the schedule, on the peak learning rates.
        grad_clip: largest global norm; 0 = off.
        qk_clip: largest pre-softmax logit of an MLA head; 0 = off.

    Raises:
        DivergedError: the loss or a gradient is not finite. Weights, momenta and biases are as before the step.
    """
    moe, mla = model.moe_layers(), mla_layers(model)
    counts = [cast(Tensor, layer.counts_E) for layer in moe]
    for counts_E in counts:
        counts_E.zero_()
    for _, mixer in mla:
        mixer.track_max_logit = qk_clip > 0
        mixer.max_logit_H.fill_(-torch.inf)
    valid = sum(int((micro.targets_BT != -100).sum()) for micro in micro_batches)
    assert valid > 0, "the step has no valid target"
    nats = 0.0
    try:
        for micro in micro_batches:
            loss = batch_loss(model, micro).nats / valid
            share = float(loss.detach())
            if not torch.isfinite(loss.detach()):
                raise _stop(model, share, micro)
            nats += share
            loss.backward()
        grads = [p.grad for p in optimizer.params.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not norm < float("inf"):
            where = first_bad((f"gradient of {name}", p.grad) for name, p in optimizer.params.items())
            raise DivergedError(
                f"the gradient norm is {norm}; first tensor that is not finite: {where or 'none: the sum of squares overflowed'}"
            )
    except DivergedError:
        optimizer.zero_grad()
        for layer in moe:
            layer.balancer.reset()
        raise
    if grad_clip and norm > grad_clip:
        torch._foreach_mul_(grads, grad_clip / norm)
    optimizer.step(factor)
    optimizer.zero_grad()
    clipped = 0
    for _, mixer in mla if qk_clip else ():
        query = mixer.q_proj if mixer.mla.q_lora_rank is None else mixer.q_b_proj
        clipped += clip_(query.weight, mixer.kv_b_proj.weight, mixer.max_logit_H, qk_clip, mixer.mla)
    with torch.no_grad():
        for layer in moe:
            layer.router.bias.copy_(layer.balancer.update(layer.router.bias))
    top = max((float(mixer.max_logit_H.max()) for _, mixer in mla), default=None) if qk_clip else None
    counts_LE = torch.stack(counts).cpu() if moe else torch.zeros(0, 0, dtype=torch.int64)
    return StepResult(nats, valid, norm, counts_LE, clipped, top)
