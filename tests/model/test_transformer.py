"""The whole model against an independent straight-line fp64 implementation, and against itself in other shapes."""

from dataclasses import replace

import pytest
import torch
from models import random_ids, random_model
from straight_line import straight_line_logits

from perilune.config import SoftmaxConfig
from perilune.config.presets import tiny
from perilune.errors import RequestError
from perilune.model import ModelState
from perilune.ops.segments import Segments

SHAPES = {
    "k3": {},
    "plain": {"residual": "plain"},
    "full": {"residual": "full"},
    "full_sublayer": {"residual": "full_sublayer"},
    "one_layer_blocks": {"attn_res_block_layers": 1},
    "three_layer_blocks": {"attn_res_block_layers": 3},
    "softplus_low_rank_gate": {"kda": replace(tiny().kda, gate_lower_bound=None, output_gate_rank=8)},
    "value_heads_wider": {"kda": replace(tiny().kda, value_head_dim=24)},
    "stored_heads": {"kda": replace(tiny().kda, stored_heads=5)},
    "full_rank_queries": {"mla": replace(tiny().mla, q_lora_rank=None, output_gate=False)},
    "no_latent_swiglu": {
        "activation": "swiglu",
        "moe": replace(tiny().moe, latent_size=None, routed_scaling_factor=2.446),
    },
    "two_shared": {"moe": replace(tiny().moe, num_shared_experts=2, latent_norm=False)},
}
OTHER_MIXERS = {
    "gdn": {"mixer": "gdn"},
    "mla_rope": {"mixer": "mla", "mla": replace(tiny().mla, rope_theta=10000.0)},
    "softmax": {"mixer": "softmax", "global_mixer": "softmax", "softmax": SoftmaxConfig(num_heads=2, head_dim=16)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_the_straight_line_model(name):
    cfg = replace(tiny(), **SHAPES[name])
    model = random_model(cfg)
    ids = random_ids(cfg, 1, 21)
    with torch.no_grad():
        ours = model(ids).logits_BTZ[0]
        truth = straight_line_logits(cfg, model.state_dict(), ids[0])
    assert truth.std() > 0.1
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)


def test_block_residual_with_one_layer_blocks_is_the_full_form():
    full, block = replace(tiny(), residual="full"), replace(tiny(), attn_res_block_layers=1)
    model = random_model(full)
    ids = random_ids(full, 1, 9)
    with torch.no_grad():
        truth = straight_line_logits(full, model.state_dict(), ids[0])
        other = random_model(block)
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(ids).logits_BTZ[0], truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*SHAPES, *OTHER_MIXERS])
def test_prefill_in_chunks_and_decode_equal_one_pass(name):
    cfg = replace(tiny(), **(SHAPES | OTHER_MIXERS)[name])
    model = random_model(cfg)
    ids = random_ids(cfg, 2, 40)
    with torch.no_grad():
        whole = model(ids).logits_BTZ
        for cuts in ([40], [1] * 40, [17, 1, 1, 16, 5], [3, 30, 7], [2, 9, 29]):
            state = model.new_state(2, capacity=4)
            parts, at = [], 0
            for size in cuts:
                parts.append(model(ids[:, at : at + size], state).logits_BTZ)
                at += size
            assert state.length == 40
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["k3", *OTHER_MIXERS])
def test_packed_documents_equal_documents_alone(name):
    cfg = replace(tiny(), **(SHAPES | OTHER_MIXERS)[name])
    model = random_model(cfg)
    ids = random_ids(cfg, 2, 30)
    starts = torch.zeros(2, 30, dtype=torch.bool)
    starts[0, [7, 8, 23]] = True
    starts[1, 29] = True
    with torch.no_grad():
        packed = model(ids, segments=Segments.from_starts(starts)).logits_BTZ
        for row, cuts in enumerate(([0, 7, 8, 23, 30], [0, 29, 30])):
            for a, b in zip(cuts, cuts[1:], strict=False):
                alone = model(ids[row : row + 1, a:b]).logits_BTZ[0]
                torch.testing.assert_close(packed[row, a:b], alone, rtol=1e-9, atol=1e-9)


def test_rows_of_different_length_continue_together():
    cfg = tiny()
    model = random_model(cfg)
    ids = random_ids(cfg, 3, 20)
    with torch.no_grad():
        states = []
        for row, length in enumerate((5, 12, 5)):
            states.append(model.new_state(1, capacity=3 + 4 * row))  # capacities differ too
            model(ids[row : row + 1, :length], states[-1])
        joint = ModelState.stack(states)
        assert joint.lengths == [5, 12, 5]
        step = torch.stack([ids[row, n : n + 2] for row, n in enumerate((5, 12, 5))])
        got = model(step, joint).logits_BTZ
        for row, length in enumerate((5, 12, 5)):
            alone = model(ids[row : row + 1, : length + 2]).logits_BTZ[0, -2:]
            torch.testing.assert_close(got[row], alone, rtol=1e-9, atol=1e-9)
        with pytest.raises(RequestError, match="different lengths"):
            _ = joint.length


def test_a_cloned_state_is_a_fork():
    cfg = tiny()
    model = random_model(cfg)
    ids = random_ids(cfg, 1, 24)
    with torch.no_grad():
        state = model.new_state()
        model(ids[:, :10], state)
        fork = state.clone()
        model(ids[:, 10:15], state)  # the original moves on
        again = model(ids[:, 10:24], fork).logits_BTZ
        torch.testing.assert_close(again, model(ids).logits_BTZ[:, 10:], rtol=1e-9, atol=1e-9)
        kept = state.select([0, 0])
        assert kept.lengths == [15, 15] and kept.nbytes() == 2 * state.nbytes()


def test_permuting_history_leaves_mla_outputs_unchanged():
    cfg = tiny()
    mixer = random_model(cfg).layers[3].mixer
    x = torch.randn(1, 12, cfg.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    shuffled = torch.cat([x[:, order], x[:, 11:]], 1)
    with torch.no_grad():
        torch.testing.assert_close(mixer(shuffled)[0][:, -1], mixer(x)[0][:, -1], rtol=1e-11, atol=1e-12)
        assert not torch.allclose(mixer(shuffled)[0][:, -2], mixer(x)[0][:, -2])


@pytest.mark.parametrize("layer", [0, 3])
def test_a_changed_future_leaves_the_past_bitwise_alone(layer):
    cfg = tiny()
    mixer = random_model(cfg, dtype=torch.float32).layers[layer].mixer
    x = torch.randn(2, 70, cfg.hidden_size, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[:, 37:] = torch.randn(2, 33, cfg.hidden_size, generator=torch.Generator().manual_seed(1)) * 3
    with torch.no_grad():
        assert torch.equal(mixer(x)[0][:, :37], mixer(y)[0][:, :37])


def test_layer_zero_reads_the_embedding():
    cfg = tiny()
    model = random_model(cfg)
    ids = random_ids(cfg, 1, 6)
    seen = []
    model.layers[0].mixer_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(ids)
    assert torch.equal(seen[0], model.embed(ids))


def test_zero_queries_read_the_mean_of_the_sources():
    cfg = tiny()
    model = random_model(cfg)
    read = model.layers[3].mixer_read
    with torch.no_grad():
        read.query.zero_()
        sources = [torch.randn(1, 4, cfg.hidden_size, dtype=torch.float64) for _ in range(3)]
        torch.testing.assert_close(read(sources)[0], sum(sources) / 3)


@pytest.mark.parametrize("name", [*SHAPES, *OTHER_MIXERS])
def test_every_parameter_gets_a_gradient(name):
    cfg = replace(tiny(), **(SHAPES | OTHER_MIXERS)[name])
    model = random_model(cfg).train()
    ids = random_ids(cfg, 2, 33)
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    assert loss.tokens == 64
    (loss.nats / loss.tokens).backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    # Layer 0's first read has a single source, so its scores never matter.
    assert silent <= {"layers.0.mixer_read.norm", "layers.0.mixer_read.query"}
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_loss_equals_cross_entropy_of_the_logits():
    cfg = tiny()
    model = random_model(cfg)
    ids = random_ids(cfg, 2, 17)
    targets = ids[:, 1:].clone()
    targets[0, 3] = -100
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits_BTZ
        truth = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 16)
        loss = model.loss(ids[:, :-1], targets)
        torch.testing.assert_close(loss.nats, truth.sum(), rtol=1e-10, atol=1e-10)
        assert loss.tokens == 31
        torch.testing.assert_close(model.token_nats(ids[:, :-1], targets), truth, rtol=1e-9, atol=1e-10)


def test_counts_and_balancer_see_training_tokens_only_once():
    cfg = tiny()
    model = random_model(cfg)
    ids = random_ids(cfg, 2, 16)
    with torch.no_grad():
        model(ids)
    assert all(int(layer.counts_E.sum()) == 0 for layer in model.moe_layers())
    model.train()
    model.loss(ids, ids).nats.backward()
    assert all(int(layer.counts_E.sum()) == 2 * 16 * cfg.moe.experts_per_token for layer in model.moe_layers())


def test_mistakes_are_named():
    cfg = tiny()
    model = random_model(cfg)
    ids = random_ids(cfg, 2, 8)
    with pytest.raises(RequestError, match="holds 1 sequences but 2"):
        model(ids, model.new_state(1))
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[0, 3] = True
    with pytest.raises(RequestError, match="not both"):
        model(ids, model.new_state(2), Segments.from_starts(starts))


@pytest.mark.parametrize("heads", [slice(0, 2), slice(1, 2)], ids=["all", "one"])
def test_keys_and_values_of_one_product(heads):
    mla = next(block.mixer for block in random_model(tiny()).layers if type(block.mixer).__name__ == "GatedMLA")
    entries_BSC = torch.randn(2, 7, mla.mla.cache_width, dtype=torch.float64)
    latent_and_shared = entries_BSC.split((mla.mla.kv_lora_rank, mla.mla.qk_rope_head_dim), dim=-1)
    for joint, expected in zip(mla.expand_joint(entries_BSC, heads), mla.expand(*latent_and_shared)):
        torch.testing.assert_close(joint, expected[:, :, heads], rtol=1e-12, atol=1e-12)
