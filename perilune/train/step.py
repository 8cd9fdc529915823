"""One optimizer step: a function of model, optimizer and micro-batches.

    nats/token over *all* valid tokens of the step → backward, micro-batch by micro-batch → global norm → clip
    → Muon and AdamW → QK-clip → balancers move the routers' biases

The loss is divided by the step's valid tokens before the backward pass, so neither the number of micro-batches nor how
the valid tokens fall into them changes a gradient. Biases move once a step, after the weights, from what the step's own
forward passes counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from perilune.data.loader import Batch
from perilune.model.latent_moe import Experts
from perilune.model.linear import Linear
from perilune.model.mla import GatedMLA
from perilune.model.transformer import LossOutput, Transformer
from perilune.ops.moe import Balancer
from perilune.ops.narrow import NarrowCopies
from perilune.ops.segments import Segments
from perilune.optim.build import Optimizer
from perilune.optim.qk_clip import clip_, heads_over
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

    @property
    def finite(self) -> bool:
        """Loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def split_rows(batch: Batch, tokens: int) -> list[Batch]:
    """Cut a batch into micro-batches of whole rows with at most `tokens` tokens each (at least one row)."""
    return batch.split(max(1, tokens // batch.ids_BT.shape[1]))


def mla_layers(model: Transformer) -> list[tuple[int, GatedMLA]]:
    """(layer number, mixer) of the MLA layers."""
    return [(i, block.mixer) for i, block in enumerate(model.layers) if isinstance(block.mixer, GatedMLA)]


def _matrices(model: Transformer) -> list[nn.Parameter]:
    """Weights that meet activations in the compute dtype only."""
    modules = [m for m in model.modules() if isinstance(m, Linear | Experts)]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


def batch_loss(model: Transformer, micro: Batch) -> LossOutput:
    """Forward pass of a micro-batch, images included."""
    device = model.device
    segments = Segments.from_starts(micro.starts_BT)
    images = micro.image_batch()
    return model.loss(
        micro.ids_BT.to(device),
        micro.targets_BT.to(device),
        None if segments is None else segments.to(device),
        images=None if images is None else images.to(device),
    )


def valid_targets(micro_batches: Sequence[Batch]) -> int:
    """Targets of a step that count; at least one."""
    valid = sum(int((micro.targets_BT != -100).sum()) for micro in micro_batches)
    assert valid > 0, "the step has no valid target"
    return valid


class Step:
    """The parts of an optimizer step, in this order: `begin`, `accumulate` for each micro-batch, `measure`, then on the host
    `read` and `check`, then `update`. On a CUDA device only `read` waits, so the others can be recorded.

    Args:
        model: in training mode.
        optimizer: over the model's parameters.
        grad_clip: largest global norm; 0 = off.
        qk_clip: largest pre-softmax logit of an MLA head; 0 = off.
    """

    def __init__(
        self, model: Transformer, optimizer: Optimizer, *, grad_clip: float = 1.0, qk_clip: float = 100.0
    ) -> None:
        self.model, self.optimizer, self.grad_clip, self.qk_clip = model, optimizer, grad_clip, qk_clip
        self.moe, self.mla = model.moe_layers(), mla_layers(model)
        self._narrow = NarrowCopies(_matrices(model), model.compute_dtype)
        self._nats = torch.zeros((), dtype=torch.float64, device=model.device)
        self._norm = torch.zeros(())

    def begin(self) -> None:
        """Forget the last step's counts; round the weights once for all that follows."""
        self._narrow.refresh()
        for layer in self.moe:
            cast(Tensor, layer.counts_E).zero_()
        for _, mixer in self.mla:
            mixer.track_max_logit = self.qk_clip > 0
            mixer.max_logit_H.fill_(-torch.inf)
        self._nats.zero_()

    def accumulate(self, loss: LossOutput, valid: int | Tensor) -> None:
        """Add a micro-batch's share of the mean over the step's `valid` targets, and its gradients."""
        share = loss.nats / valid
        share.backward()
        self._nats += share.detach()  # in place: a recording adds to it as often as it is replayed

    def measure(self) -> Tensor:
        """What the host wants to know, float64 `[4 + L * E]`: loss, gradient norm, heads to be clipped, largest logit, loads."""
        grads = [p.grad for p in self.optimizer.params.values() if p.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(grads)
        found = [self._nats, self._norm]
        if self.mla and self.qk_clip:
            logits = torch.cat([mixer.max_logit_H for _, mixer in self.mla])
            found += [heads_over(logits, self.qk_clip).sum(), logits.max()]
        else:
            found += [torch.zeros_like(self._nats)] * 2
        numbers = torch.stack([x.double() for x in found])
        return torch.cat([numbers, *(cast(Tensor, layer.counts_E).double() for layer in self.moe)])

    def read(self, measured: Tensor, valid: int) -> StepResult:
        """The result, once the device has come that far."""
        loss, norm, clipped, top = (numbers := measured.cpu())[:4].tolist()
        counts_LE = (
            numbers[4:].to(torch.int64).view(len(self.moe), -1) if self.moe else torch.zeros(0, 0, dtype=torch.int64)
        )
        return StepResult(loss, valid, norm, counts_LE, int(clipped), top if self.mla and self.qk_clip else None)

    def check(self, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        """Give the step up if its loss or gradient is not finite.

        Raises:
            DivergedError: it is not; says where that began. Weights, momenta and biases are as before the step.
        """
        if result.finite:
            return
        error = self._diverged(result, micro_batches)
        self.forget()
        raise error

    def forget(self) -> None:
        """Drop what a step that is given up has left: gradients, rounded weights, and what the balancers saw."""
        self._narrow.drop()
        self.optimizer.zero_grad()
        for layer in self.moe:
            layer.balancer.reset()

    def _diverged(self, result: StepResult, micro_batches: Sequence[Batch]) -> DivergedError:
        model = self.model
        if math.isfinite(result.loss):
            where = first_bad((f"gradient of {name}", p.grad) for name, p in self.optimizer.params.items())
            where = where or "none: the sum of squares overflowed"
            return DivergedError(f"the gradient norm is {result.grad_norm}; first tensor that is not finite: {where}")
        where = first_bad(model.state_dict().items())
        for micro in micro_batches if where is None else ():
            where = where or first_bad_activation(model, lambda micro=micro: batch_loss(model, micro))
        return DivergedError(
            f"the loss is {result.loss}; first tensor that is not finite: {where or 'the loss itself'}"
        )

    @torch.no_grad()
    def update(self, move_weights: Callable[..., None]) -> None:
        """Clip the gradients, move the weights, clip the attention's, move the routers' biases.

        Args:
            move_weights: the optimizer's step; called with the factor on the gradients, a number on the device, if there is
                one that is not applied yet.
        """
        self._narrow.drop()
        scale = self._clip_gradients()
        move_weights(*(() if scale is None else (scale,)))
        self.optimizer.zero_grad()
        for _, mixer in self.mla if self.qk_clip else ():
            query = mixer.q_proj if mixer.mla.q_lora_rank is None else mixer.q_b_proj
            clip_(query.weight, mixer.kv_b_proj.weight, mixer.max_logit_H, self.qk_clip, mixer.mla)
        biases = [layer.router.bias for layer in self.moe]
        for bias_E, new_E in zip(
            biases, Balancer.update_all([layer.balancer for layer in self.moe], biases), strict=True
        ):
            bias_E.copy_(new_E)

    def _clip_gradients(self) -> Tensor | None:
        """On the CPU scale the gradients where they are too long; elsewhere return the factor that the optimizer applies."""
        if not self.grad_clip:
            return None
        if not self._norm.is_cpu:
            return (self.grad_clip / self._norm).clamp_(max=1.0)
        norm = float(self._norm)
        if norm > self.grad_clip:
            grads = [p.grad for p in self.optimizer.params.values() if p.grad is not None]
            torch._foreach_mul_(grads, self.grad_clip / norm)
        return None


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
    step, valid = Step(model, optimizer, grad_clip=grad_clip, qk_clip=qk_clip), valid_targets(micro_batches)
    step.begin()
    for micro in micro_batches:
        step.accumulate(batch_loss(model, micro), valid)
    result = step.read(step.measure(), valid)
    step.check(result, micro_batches)
    step.update(lambda *scale: optimizer.step(factor, *scale))
    return result
