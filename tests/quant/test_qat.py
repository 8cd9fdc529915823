"""Quantisation-aware training: what is rounded and what is not, gradients, and that every path computes the same."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perilune.config import ModelConfig, OptimConfig, QuantConfig
from perilune.config import train as train_config
from perilune.config.presets import tiny
from perilune.data.loader import Batch
from perilune.errors import ConfigError
from perilune.model.init import init_weights
from perilune.model.transformer import Transformer
from perilune.ops import mx
from perilune.ops.moe import routed_experts
from perilune.optim.build import Optimizer
from perilune.quant import apply_qat, qat, quantize_experts
from perilune.train.step import train_step

W4A16 = QuantConfig(weights="mxfp4")
W4A8 = QuantConfig(weights="mxfp4", activations="mxfp8")
EXPERTS = (".experts.w1", ".experts.w2", ".experts.w3")


def model_of(cfg: ModelConfig | None = None, dtype: torch.dtype = torch.float32) -> Transformer:
    """Random weights large enough for the experts to matter, masters off the grid."""
    model = init_weights(Transformer(cfg or tiny()), 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "conv" not in name:
                p.mul_(4.0)
    model.compute_dtype = dtype
    return model.eval() if dtype != torch.float64 else model.double().eval()


def ids_of(rows: int = 2, tokens: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(0, 512, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def logits(model: Transformer, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits_BTZ


def token_by_token(model: Transformer, ids: Tensor) -> Tensor:
    """Logits of a decode: every token in its own call, against the state."""
    state = model.new_state(ids.shape[0], ids.shape[1])
    with torch.no_grad():
        return torch.cat([model(ids[:, t : t + 1], state).logits_BTZ for t in range(ids.shape[1])], dim=1)


@pytest.mark.parametrize("rule", train_config.SCALE_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quantised_forward_is_the_forward_of_the_quantised_weights(dtype, rule):
    """Bit for bit, over whole sequences and token by token."""
    plain = model_of(dtype=dtype)
    trained, snapped = copy.deepcopy(plain), copy.deepcopy(plain)
    apply_qat(trained, replace(W4A16, rule=rule))
    quantize_experts(snapped, rule)
    ids = ids_of()
    assert torch.equal(logits(trained, ids), logits(snapped, ids))
    assert torch.equal(token_by_token(trained, ids), token_by_token(snapped, ids))
    assert not torch.allclose(logits(trained, ids), logits(plain, ids), atol=1e-3)
    released = copy.deepcopy(plain)
    with torch.no_grad():
        for layer in released.moe_layers():
            for weight in layer.experts.parameters():
                weight.copy_(
                    mx.dequantize_mxfp4(*mx.quantize_mxfp4(weight, rule))
                )  # by way of the codes, through bfloat16
    assert torch.equal(logits(trained, ids), logits(released, ids))
    both = copy.deepcopy(snapped)
    apply_qat(both, replace(W4A16, rule=rule))
    assert torch.equal(logits(both, ids), logits(snapped, ids)), "weights on the grid are rounded to themselves"


def test_activations_are_rounded_on_top():
    trained, snapped, ids = model_of(), model_of(), ids_of()
    apply_qat(trained, W4A8)
    quantize_experts(snapped)
    w4a16 = logits(snapped, ids)
    apply_qat(snapped, replace(W4A8, weights="none"))
    assert torch.equal(logits(trained, ids), logits(snapped, ids))
    assert torch.equal(token_by_token(trained, ids), token_by_token(snapped, ids))
    assert not torch.equal(logits(snapped, ids), w4a16)


def test_only_the_routed_experts_change_and_nothing_is_renamed():
    plain, snapped = model_of(), model_of()
    before = set(plain.state_dict())
    apply_qat(snapped, W4A8)
    assert set(snapped.state_dict()) == before
    quantize_experts(snapped)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, snapped.state_dict()[name]) != name.endswith(EXPERTS), name
    for layer in snapped.moe_layers():
        for weight in layer.experts.parameters():
            assert torch.equal(mx.dequantize_mxfp4(*mx.quantize_mxfp4(weight.detach()), torch.float32), weight)


def test_taking_it_away_leaves_the_plain_model():
    model, ids = model_of(), ids_of()
    before = logits(model, ids)
    apply_qat(model, W4A8)
    assert not torch.equal(logits(model, ids), before)
    apply_qat(model, QuantConfig())
    assert torch.equal(logits(model, ids), before)
    assert all(layer.experts_function is routed_experts for layer in model.moe_layers())


def test_master_weights_get_the_gradient_at_the_rounded_weights():
    """Straight through: what backward gives the masters is the gradient of the model whose weights are the rounded ones."""
    masters, snapped, ids = model_of(), model_of(), ids_of()
    apply_qat(masters, W4A16)
    quantize_experts(snapped)
    for model in (masters, snapped):
        model.train().loss(ids[:, :-1], ids[:, 1:]).nats.backward()
    for (name, p), q in zip(masters.named_parameters(), snapped.parameters(), strict=True):
        if p.grad is not None:  # a query of the first read has none
            assert torch.equal(p.grad, q.grad), name
    assert any(p.grad.any() for layer in masters.moe_layers() for p in layer.experts.parameters())


def log_probabilities(logits_BTZ: Tensor, ids: Tensor) -> Tensor:
    return logits_BTZ.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])


def test_rollout_and_trainer_agree_only_if_both_quantise():
    """posttraining A7: log-probabilities of a decode and of a training forward, and the control with one side unquantised."""
    ids = ids_of(rows=1, tokens=48)
    for dtype, mean, most in ((torch.float64, 1e-10, 1e-9), (torch.float32, 5e-6, 1e-4)):
        trainer, rollout = model_of(dtype=dtype), model_of(dtype=dtype)
        apply_qat(trainer, W4A8)
        apply_qat(rollout, W4A8)
        sampled = log_probabilities(token_by_token(rollout, ids), ids)
        gap = (log_probabilities(logits(trainer, ids), ids) - sampled).abs()
        assert float(gap.mean()) < mean and float(gap.max()) < most
        apply_qat(trainer, QuantConfig())
        off = (log_probabilities(logits(trainer, ids), ids) - sampled).abs()
        assert float(off.mean()) > 1000 * mean


def test_a_decode_step_rounds_only_the_experts_it_uses(monkeypatch):
    model, ids = model_of(), ids_of(rows=1, tokens=6)
    apply_qat(model, W4A16)
    rounded = []
    original = qat.fake_quantize
    monkeypatch.setattr(qat, "fake_quantize", lambda x, *a: rounded.append(x.shape[0]) or original(x, *a))
    decoded = token_by_token(model, ids)
    assert set(rounded) == {2}, "two of the eight experts for one token"
    rounded.clear()
    whole = logits(model, ids)
    assert set(rounded) == {8}
    torch.testing.assert_close(decoded, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quant", [W4A16, W4A8], ids=["w4a16", "w4a8"])
def test_training_learns_and_keeps_full_precision_masters(quant):
    torch.manual_seed(0)
    cfg = tiny()
    model = init_weights(Transformer(cfg), 0).train()
    apply_qat(model, quant)
    optimizer = Optimizer(model.named_parameters(), cfg, OptimConfig())
    ids = ids_of(rows=4, tokens=33)
    starts = torch.zeros(4, 32, dtype=torch.bool)
    batch = Batch(ids[:, :-1].clone(), ids[:, 1:].clone(), starts)
    losses = [train_step(model, optimizer, [batch], factor=1.0).loss for _ in range(15)]
    assert losses[0] == pytest.approx(6.24, abs=0.1) and losses[-1] < losses[0] - 2.0
    weight = model.moe_layers()[0].experts.w1.detach()
    assert weight.dtype == torch.float32 and not torch.equal(mx.fake_quantize(weight), weight)
    before = model.loss(batch.ids_BT, batch.targets_BT).nats
    quantize_experts(model)
    assert torch.equal(model.loss(batch.ids_BT, batch.targets_BT).nats, before), "the snapped model is what was trained"


def test_models_that_cannot_be_quantised():
    moe = tiny().moe
    for changes, message in (
        ({"moe": replace(moe, expert_size=40)}, r"model\.moe\.expert_size=40 .*next: 64"),
        ({"moe": replace(moe, latent_size=48)}, r"model\.moe\.latent_size=48 .*next: 64"),
        ({"dense_layers": 4}, "has none"),
    ):
        model = Transformer(replace(tiny(), **changes))
        apply_qat(model, QuantConfig())
        for act in (lambda m: apply_qat(m, W4A16), quantize_experts):
            with pytest.raises(ConfigError, match=message):
                act(model)


def test_settings_are_checked_and_name_what_the_operations_have():
    assert train_config.SCALE_RULES == mx.RULES and train_config.QUANT_ACTIVATIONS == mx.ACTIVATIONS
    assert train_config.QUANT_WEIGHTS == ("none", "mxfp4")
    for wrong in ({"weights": "int4"}, {"activations": "fp8"}, {"rule": "nearest"}):
        ((name, value),) = wrong.items()
        with pytest.raises(ConfigError, match=rf"quant\.{name}='{value}' is not known; allowed: "):
            QuantConfig(**wrong)
