"""The whole model on a GPU in bfloat16: as exact as plain torch in bfloat16, decode equals prefill, training learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perilune.bench.kimi_linear import kimi_linear_shaped, random_ids
from perilune.config import ModelConfig
from perilune.config.presets import nano
from perilune.model import Transformer, init_weights
from perilune.ops.choice import force
from perilune.ops.segments import Segments


def wide_heads() -> ModelConfig:
    """`nano` with K3's head size, which the kernels know best."""
    cfg = nano()
    return replace(cfg, kda=replace(cfg.kda, head_dim=128))


SHAPES = {"nano": nano, "wide_heads": wide_heads, "kimi_linear": lambda: kimi_linear_shaped(nano())}


def gradients(model: Transformer, ids: Tensor, segments: Segments | None) -> dict[str, Tensor]:
    """The mean loss and every gradient."""
    model.zero_grad()
    loss = model.loss(ids[:, :-1], ids[:, 1:], segments)
    (loss.nats / loss.tokens).backward()
    found = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": (loss.nats / loss.tokens).detach().double().cpu()}


def error(got: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Error of all gradients together, relative to their norm."""
    names = [name for name in truth if name != "loss"]
    far = sum(float((got[name] - truth[name]).square().sum()) for name in names)
    return (far / sum(float(truth[name].square().sum()) for name in names)) ** 0.5


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients_are_as_exact_as_plain_torch(name: str, packed: bool) -> None:
    cfg = SHAPES[name]()
    ids = random_ids(cfg, 2, 301)
    starts = torch.zeros(2, 300, dtype=torch.bool)
    starts[:, 0] = starts[0, 97] = starts[1, 200] = True
    segments = Segments.from_starts(starts) if packed else None
    exact = init_weights(Transformer(cfg)).double().train()
    exact.compute_dtype = torch.float64
    truth = gradients(exact, ids, segments)
    model = init_weights(Transformer(cfg)).cuda().train()
    model.compute_dtype = torch.bfloat16
    on_device = None if segments is None else Segments.from_starts(starts.cuda())
    got = gradients(model, ids.cuda(), on_device)
    with force("torch"):
        plain = gradients(model, ids.cuda(), on_device)
    assert abs(got["loss"] - truth["loss"]) < 5e-3, (got["loss"], truth["loss"])
    # The softplus gate's kernels keep operands in bfloat16 that plain torch has in float32: 1.14 was seen.
    limit = 1.25 if name == "kimi_linear" else 1.1
    assert error(got, truth) <= limit * error(plain, truth), (error(got, truth), error(plain, truth))


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_decode_continues_what_prefill_began(name: str) -> None:
    cfg = SHAPES[name]()
    model = init_weights(Transformer(cfg)).cuda().eval()
    model.compute_dtype = torch.bfloat16
    ids = random_ids(cfg, 3, 140).cuda()
    whole = model(ids).logits_BTZ.float()
    state = model.new_state(3)
    parts = [
        model(ids[:, :100], state).logits_BTZ,
        *(model(ids[:, t : t + 1], state).logits_BTZ for t in range(100, 140)),
    ]
    got = torch.cat(parts, 1).float()
    assert float((got - whole).abs().mean() / whole.std()) < 2e-2
    assert state.lengths == [140] * 3


def test_training_learns_a_repeated_batch() -> None:
    from perilune.bench.train import ours_step
    from perilune.config import OptimConfig

    cfg = nano()
    model = init_weights(Transformer(cfg)).cuda()
    step = ours_step(model, OptimConfig(), torch.bfloat16, random_ids(cfg, 4, 129).cuda())
    losses = [step() for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0], losses
    assert all(int(layer.counts_E.sum()) == 12 * 4 * 128 * cfg.moe.experts_per_token for layer in model.moe_layers())
