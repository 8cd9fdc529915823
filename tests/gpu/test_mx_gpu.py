"""The MX formats on a GPU: bit for bit what the CPU makes, and a quantised training step that agrees with it."""

from __future__ import annotations

import copy

import pytest
import torch

from perilune.config import QuantConfig
from perilune.config.presets import tiny
from perilune.model.init import init_weights
from perilune.model.transformer import Transformer
from perilune.ops.mx import RULES, dequantize_mxfp4, dequantize_mxfp8, fake_quantize, quantize_mxfp4, quantize_mxfp8
from perilune.ops.mx.blocks import select
from perilune.quant import apply_qat, quantize_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_codes_scales_and_values_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(512, 2880, generator=torch.Generator().manual_seed(0))
    x = (x * torch.exp(4 * torch.randn(512, 2880, generator=torch.Generator().manual_seed(1)))).to(dtype)
    x[3, 5], x[4, 40], x[5], x[6] = torch.nan, -torch.inf, 0.0, 1e-39
    for rule in RULES:
        for quantize, dequantize in ((quantize_mxfp4, dequantize_mxfp4), (quantize_mxfp8, dequantize_mxfp8)):
            here, there = quantize(x, rule), quantize(x.cuda(), rule)
            assert all(torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in zip(here, there))
            a, b = dequantize(*here, dtype), dequantize(*there, dtype).cpu()
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])
        for block_format in ("mxfp4", "mxfp8"):
            a, b = (
                fake_quantize(x[:, :70], block_format, rule),
                fake_quantize(x.cuda()[:, :70], block_format, rule).cpu(),
            )
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])
    assert select(x.cuda()).implementation == ("torch" if dtype == torch.float64 else "triton")


def test_a_quantised_step_agrees_with_the_cpu() -> None:
    quant = QuantConfig(weights="mxfp4", activations="mxfp8")
    ids = torch.randint(0, 512, (2, 65), generator=torch.Generator().manual_seed(0))
    losses, norms = [], []
    for device in ("cpu", "cuda"):
        model = init_weights(Transformer(tiny()), 0).to(device).train()
        apply_qat(model, quant)
        nats = model.loss(ids[:, :-1].to(device), ids[:, 1:].to(device)).nats
        nats.backward()
        losses.append(float(nats.detach()) / 128)
        norms.append([float(p.grad.norm()) for layer in model.moe_layers() for p in layer.experts.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert norms[0] == pytest.approx(norms[1], rel=0.03)


def test_snapped_weights_compute_what_was_trained() -> None:
    trained = init_weights(Transformer(tiny()), 0).cuda().eval()
    trained.compute_dtype = torch.bfloat16
    snapped = copy.deepcopy(trained)
    apply_qat(trained, QuantConfig(weights="mxfp4"))
    quantize_experts(snapped)
    ids = torch.arange(40, device="cuda")[None]
    with torch.no_grad():
        assert torch.equal(trained(ids).logits_BTZ, snapped(ids).logits_BTZ)
