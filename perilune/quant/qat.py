"""Quantisation-aware training of the routed experts (report §4.1.4; training, "QAT").

    y = Σ_e p_e W2' glu(W1' z', W3' z')      W' = Q4(W), and every product's input x' = Q8(x); gradients pass straight through

Attention, latent projections, shared experts and router keep their precision. The model is not rebuilt: each expert layer
gets another function in the place of `ops.moe.routed_experts`, and its parameters, their names, the optimizer and the
checkpoints stay what they are, full-precision masters. Training, evaluation and rollout call the same function, so they
see the same weights; `quantize_experts` writes those weights into the masters, for serving and export.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from perilune.config.train import QuantConfig
from perilune.errors import ConfigError
from perilune.model.latent_moe import LatentMoE
from perilune.model.transformer import Transformer
from perilune.ops.moe import routed_experts
from perilune.ops.mx import fake_quantize, rounded_input_experts
from perilune.ops.mx.scale import GROUP


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """`ops.moe.routed_experts` with rounded weights and inputs: a drop-in for `LatentMoE.experts_function`.

    With gradients all experts are rounded, and one rounded copy of a layer's weights lives until its backward pass. A few
    tokens without gradients (a decode step) round only the experts that they chose.
    """

    config: QuantConfig

    def __call__(
        self, z_NL: Tensor, index_NA: Tensor, weight_NA: Tensor, w1_EFL: Tensor, w3_EFL: Tensor, w2_ELF: Tensor,
        activation: str = "situ", *, beta: float = 4.0, linear_beta: float | None = 25.0,
    ) -> Tensor:  # fmt: skip
        """See `ops.moe.routed_experts`."""
        weights = (w1_EFL, w3_EFL, w2_ELF)
        if self.config.weights == "mxfp4":
            if not torch.is_grad_enabled() and index_NA.numel() < w1_EFL.shape[0]:
                used, index_NA = index_NA.unique(return_inverse=True)
                weights = tuple(w[used] for w in weights)
            weights = tuple(fake_quantize(w, "mxfp4", self.config.rule) for w in weights)
        function = routed_experts
        if self.config.activations == "mxfp8":
            function = partial(rounded_input_experts, rule=self.config.rule)
        return function(z_NL, index_NA, weight_NA, *weights, activation, beta=beta, linear_beta=linear_beta)


def apply_qat(model: Transformer, config: QuantConfig) -> None:
    """Make every expert layer of `model` compute as `config` says, from the next forward on; "none" twice takes it away.

    Raises:
        ConfigError: the model has no experts, or an expert's width does not divide into blocks.
    """
    layers = model.moe_layers()
    if config.on:
        _check(model, layers)
    for layer in layers:
        layer.experts_function = QuantizedExperts(config) if config.on else routed_experts


@torch.no_grad()
def quantize_experts(model: Transformer, rule: str = "floor") -> None:
    """Round the routed experts' weights to the MXFP4 grid in place, as training with `weights="mxfp4"` sees them.

    Afterwards the model computes W4A16 with no further rounding, on the fast path of plain experts; W4A8 is
    `apply_qat(model, QuantConfig(activations="mxfp8"))` on top. Rounding twice changes nothing.

    Raises:
        ConfigError: as `apply_qat`, or an unknown rule.
    """
    layers = model.moe_layers()
    _check(model, layers)
    for layer in layers:
        for weight in layer.experts.parameters():
            for matrix in weight:  # one expert at a time: no second copy of the layer
                matrix.copy_(fake_quantize(matrix, "mxfp4", rule))


def _check(model: Transformer, layers: list[LatentMoE]) -> None:
    if not layers:
        raise ConfigError(
            "quant rounds routed experts, but this model has none; set quant.weights and quant.activations to none"
        )
    moe = model.cfg.moe
    widths = {"model.moe.expert_size": moe.expert_size}
    name = "model.hidden_size" if moe.latent_size is None else "model.moe.latent_size"
    widths[name] = moe.latent_size or model.cfg.hidden_size
    for name, width in widths.items():
        if width % GROUP:
            raise ConfigError(
                f"{name}={width} does not divide into MX blocks of {GROUP}; choose a multiple of {GROUP} "
                f"(next: {-(-width // GROUP) * GROUP}) or leave quant off"
            )
