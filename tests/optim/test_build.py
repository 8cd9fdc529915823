"""The two optimizers together: every parameter moves once, on its own rate, and the state round-trips."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perilune.config import OptimConfig
from perilune.config.presets import tiny
from perilune.errors import CheckpointError
from perilune.model.init import init_weights
from perilune.model.transformer import Transformer
from perilune.optim.build import Optimizer, muon_dtype_for


def made(**optim) -> tuple[Transformer, Optimizer]:
    model = init_weights(Transformer(tiny()), 0)
    return model, Optimizer(model.named_parameters(), tiny(), OptimConfig(**optim))


def give_gradients(model: Transformer, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw)


def test_adamw_part_equals_torchs_adamw_with_decay_on_matrices_only():
    model, optimizer = made(weight_decay=0.3)
    twin, _ = made()
    named = dict(twin.named_parameters())
    split = {True: [], False: []}
    for name, t in optimizer.treatments.items():
        if t.rule == "adamw":
            split[t.decay].append(named[name])
    assert split[True] and split[False]
    oracle = torch.optim.AdamW(
        [{"params": split[True], "weight_decay": 0.3}, {"params": split[False], "weight_decay": 0.0}],
        lr=0.006 * 0.5, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for step in range(3):
        give_gradients(model, step)
        give_gradients(twin, step)
        optimizer.step(0.5)
        oracle.step()
    for name, p in model.named_parameters():
        if optimizer.treatments[name].rule == "adamw":
            torch.testing.assert_close(p, named[name], rtol=1e-5, atol=1e-7)


def test_every_parameter_moves_and_a_missing_gradient_counts_as_zero():
    model, optimizer = made()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    give_gradients(model, 0)
    model.norm.weight.grad = None
    optimizer.step(1.0)
    still = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert still == ["norm.weight"]


def test_rate_zero_moves_nothing():
    model, optimizer = made()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    give_gradients(model, 0)
    optimizer.step(0.0)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", ["muon", "muon_whole", "adamw"])
def test_state_carries_over_bitwise(name):
    model, optimizer = made(name=name)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step(1.0)
    twin, other = made(name=name)
    twin.load_state_dict(model.state_dict())
    other.load_state_tensors({k: v.clone() for k, v in optimizer.state_tensors().items()})
    for each, its in ((model, optimizer), (twin, other)):
        give_gradients(each, 9)
        its.step(0.7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(v, other.state_tensors()[k]) for k, v in optimizer.state_tensors().items())


def test_a_foreign_state_is_refused_with_what_differs():
    model, optimizer = made()
    give_gradients(model, 0)
    optimizer.step(1.0)
    state = dict(optimizer.state_tensors())
    _, whole = made(name="adamw")
    with pytest.raises(CheckpointError, match=r"does not fit this run \(adamw\): adamw\.exp_avg\.layers.* is missing"):
        whole.load_state_tensors(state)
    wrong = state | {"muon.momentum.layers.0.mixer.o_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match=r"o_proj\.weight has shape \[2, 2\] instead of \[64, 32\]"):
        optimizer.load_state_tensors(wrong)
    with pytest.raises(CheckpointError, match="extra is unknown"):
        optimizer.load_state_tensors(state | {"extra": torch.zeros(1)})


def test_a_frozen_parameter_is_left_alone():
    model = init_weights(Transformer(tiny()), 0)
    model.embed.weight.requires_grad_(False)
    optimizer = Optimizer(model.named_parameters(), tiny(), OptimConfig())
    assert "embed.weight" not in optimizer.params


def test_bf16_products_only_where_they_are_fast():
    assert muon_dtype_for(torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert muon_dtype_for(torch.device("cuda"), torch.float32) is None
    assert muon_dtype_for(torch.device("cpu"), torch.bfloat16) is None


def test_no_muon_group_is_left_when_adamw_is_chosen():
    _, optimizer = made(name="adamw")
    assert not optimizer.muon.params and optimizer.adamw is not None
    optimizer.optim = replace(optimizer.optim, lr_adamw=1.0)
    assert optimizer.rates(0.5) == (0.01, 0.5)
