"""The step: normalisation, counting once, what happens when numbers go bad."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from perilune.config import OptimConfig
from perilune.config.presets import tiny
from perilune.data.loader import Batch
from perilune.model.init import init_weights
from perilune.model.transformer import Transformer
from perilune.optim.build import Optimizer
from perilune.train.nonfinite import DivergedError
from perilune.train.step import mla_layers, split_rows, train_step


def made(seed: int = 0, optim: OptimConfig | None = None, **changes) -> tuple[Transformer, Optimizer]:
    cfg = replace(tiny(), **changes)
    model = init_weights(Transformer(cfg), seed).train()
    return model, Optimizer(model.named_parameters(), cfg, optim or OptimConfig())


def batch(rows: int = 4, length: int = 32, ignored: tuple[int, ...] = (), seed: int = 0) -> Batch:
    """Rows of random tokens; the rows in `ignored` have only two valid targets."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (rows, length + 1), generator=draw)
    targets = ids[:, 1:].clone()
    for row in ignored:
        targets[row, 2:] = -100
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[1, 10] = True
    return Batch(ids[:, :-1].clone(), targets, starts)


def given(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Gradients as the optimizer sees them; a missing one is zero."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in optimizer.params.items()}


def saw_nothing(model: Transformer) -> bool:
    """True if no balancer holds counts: its next bias is the present one."""
    return all(torch.equal(layer.balancer.update(layer.router.bias), layer.router.bias) for layer in model.moe_layers())


def gradients(model: Transformer, optimizer: Optimizer, micro: list[Batch], monkeypatch) -> dict[str, torch.Tensor]:
    """The gradients that the optimizer is given."""
    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(optimizer, "step", lambda factor: seen.update(given(optimizer)))
    train_step(model, optimizer, micro, factor=1.0, grad_clip=0.0)
    return seen


@pytest.mark.parametrize("ignored", [(), (0,), (2, 3)])
def test_t38_t39_micro_batches_give_the_gradients_of_one_batch(monkeypatch, ignored):
    """Also where the valid tokens fall unevenly into them."""
    whole = batch(ignored=ignored)
    one = gradients(*made(), [whole], monkeypatch)
    for tokens in (32, 64):
        micro = split_rows(whole, tokens)
        assert len(micro) == 128 // tokens
        several = gradients(*made(), micro, monkeypatch)
        for name, grad in one.items():
            torch.testing.assert_close(several[name], grad, rtol=2e-4, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_t38_a_second_step_does_not_see_the_firsts_gradients(monkeypatch):
    model, optimizer = made()
    train_step(model, optimizer, split_rows(batch(), 64), factor=1.0)
    assert all(p.grad is None for p in model.parameters())


def test_the_loss_is_nats_per_valid_token():
    model, optimizer = made()
    whole = batch(ignored=(1,))
    expected = model.loss(whole.ids_BT, whole.targets_BT).nats  # row 1 has its boundary after its valid targets
    result = train_step(model, optimizer, split_rows(whole, 32), factor=0.0)
    assert result.tokens == 3 * 32 + 2
    assert result.loss == pytest.approx(float(expected.detach()) / result.tokens, rel=1e-5)


def test_grad_norm_counts_each_parameter_once_and_clipping_scales_all(monkeypatch):
    grads = gradients(*made(), [batch()], monkeypatch)
    norm = float(torch.cat([g.flatten() for g in grads.values()]).double().norm())
    model, optimizer = made()
    clipped: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(optimizer, "step", lambda factor: clipped.update(given(optimizer)))
    result = train_step(model, optimizer, [batch()], factor=1.0, grad_clip=norm / 4)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(clipped[name], grad / 4, rtol=1e-4, atol=1e-9)


def test_t40_tokens_count_once_and_biases_move_once_after_the_weights(monkeypatch):
    model, optimizer = made()
    order: list[str] = []
    real = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda factor: (order.append("weights"), real(factor)))
    for layer in model.moe_layers():
        update = layer.balancer.update
        monkeypatch.setattr(
            layer.balancer, "update", lambda bias, update=update: (order.append("bias"), update(bias))[1]
        )
    before = [layer.router.bias.clone() for layer in model.moe_layers()]
    result = train_step(model, optimizer, split_rows(batch(), 32), factor=1.0)
    layers = model.moe_layers()
    assert order == ["weights"] + ["bias"] * len(layers)
    assert result.counts_LE.sum(1).tolist() == [128 * 2] * len(layers), "every token once, two experts each"
    assert all(not torch.equal(a, layer.router.bias) for a, layer in zip(before, layers, strict=True))
    assert saw_nothing(model), "the next step counts from zero"


def test_t40_recomputation_changes_neither_counts_nor_biases():
    """Activation checkpointing runs every layer's forward a second time."""
    from torch.utils.checkpoint import checkpoint

    plain, plain_optimizer = made(residual="plain")
    again, again_optimizer = made(residual="plain")
    for block in again.layers:
        inner = block.ffn.forward
        block.ffn.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    a = train_step(plain, plain_optimizer, split_rows(batch(), 64), factor=1.0)
    b = train_step(again, again_optimizer, split_rows(batch(), 64), factor=1.0)
    assert torch.equal(a.counts_LE, b.counts_LE)
    for one, two in zip(plain.moe_layers(), again.moe_layers(), strict=True):
        assert torch.equal(one.router.bias, two.router.bias)


def test_evaluation_moves_no_bias_and_counts_nothing():
    model, _ = made()
    model.eval()
    with torch.no_grad():
        model.loss(batch().ids_BT, batch().targets_BT)
    assert saw_nothing(model)
    assert all(int(layer.counts_E.sum()) == 0 for layer in model.moe_layers())


def test_qk_clip_holds_the_same_batchs_logits_below_tau():
    """One MLA layer, so that no other layer's clipping changes its input."""
    model, optimizer = made(num_layers=1, mixer="mla", dense_layers=1, residual="plain")
    with torch.no_grad():
        model.layers[0].mixer.q_b_proj.weight.mul_(60.0)
    tau = 2.0
    result = train_step(model, optimizer, split_rows(batch(), 64), factor=0.0, qk_clip=tau)
    assert result.max_logit > tau and result.clipped_heads >= 1
    ((_, mixer),) = mla_layers(model)
    after = train_step(model, optimizer, split_rows(batch(), 64), factor=0.0, qk_clip=tau)
    assert after.max_logit == pytest.approx(tau, rel=1e-4)
    assert float(mixer.max_logit_H.max()) <= tau * (1 + 1e-4)


def test_without_qk_clip_no_logit_is_computed(monkeypatch):
    model, optimizer = made()
    monkeypatch.setattr(import_module("perilune.ops.mla.attend"), "max_logit", lambda *a: pytest.fail("computed"))
    assert train_step(model, optimizer, [batch()], factor=1.0, qk_clip=0.0).max_logit is None


def frozen(model: Transformer, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in (model.state_dict() | optimizer.state_tensors()).items()}


def test_a_bad_weight_is_named_and_nothing_moves():
    model, optimizer = made()
    with torch.no_grad():
        model.layers[2].ffn.experts.w1[3, 0, 0] = float("nan")
    before = frozen(model, optimizer)
    with pytest.raises(DivergedError, match=r"the loss is nan; .* layers\.2\.ffn\.experts\.w1 \(1 of 8192 values"):
        train_step(model, optimizer, split_rows(batch(), 64), factor=1.0)
    after = model.state_dict() | optimizer.state_tensors()
    assert all(torch.equal(after[n].nan_to_num(), t.nan_to_num()) for n, t in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert saw_nothing(model)


def test_a_bad_activation_is_named_by_its_module():
    model, optimizer = made()
    model.layers[1].ffn.register_forward_hook(lambda module, inputs, output: output * float("inf"))
    with pytest.raises(DivergedError, match=r"output of layers\.1\.ffn \("):
        train_step(model, optimizer, [batch()], factor=1.0)


def test_a_bad_gradient_is_named():
    model, optimizer = made()
    model.layers[0].mixer.o_proj.weight.register_hook(lambda grad: grad * float("nan"))
    before = frozen(model, optimizer)
    with pytest.raises(DivergedError, match=r"gradient norm is nan; .* gradient of layers\.0\.mixer\.o_proj\.weight"):
        train_step(model, optimizer, [batch()], factor=1.0)
    after = model.state_dict() | optimizer.state_tensors()
    assert all(torch.equal(after[n], t) for n, t in before.items())


@pytest.mark.parametrize("name", ["muon", "muon_whole", "adamw"])
def test_every_optimizer_learns_a_repeated_batch(name):
    model, optimizer = made(optim=OptimConfig(name=name))
    losses = [train_step(model, optimizer, [batch()], factor=0.5).loss for _ in range(6)]
    assert losses[-1] < losses[0] - 0.5, losses
