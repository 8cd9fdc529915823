"""config.json of Kimi K3 and Kimi-Linear: official documents, our configurations, and everything that must be refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_documents import QUANTIZATION, at, flat_document, k3_document, linear_document

from perilune.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, SoftmaxConfig, VisionConfig
from perilune.config.presets import PRESETS, k3, kimi_linear_48b, tiny
from perilune.config.published import canonical, from_json, generation_config, load_config, publish, to_json
from perilune.errors import ConfigError

DOCUMENTS = {"k3": k3_document, "linear": linear_document, "flat": flat_document}
PUBLISHED = [name for name in PRESETS if name != "k2_nano"]


def test_official_documents_are_the_presets():
    assert from_json(k3_document()).model == k3() and from_json(k3_document()).experts == "mxfp4"
    assert from_json(linear_document()).model == kimi_linear_48b() and from_json(linear_document()).experts == "bf16"
    assert from_json(flat_document()).model == kimi_linear_48b()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_comes_back_as_it_was(name):
    document = DOCUMENTS[name]()
    again = to_json(from_json(document))
    assert again == document and list(again) == list(document)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_our_configurations_come_back_as_they_were(name, experts):
    published = publish(PRESETS[name](), experts=experts, bos=1, eos=2, pad=0)
    read = from_json(json.loads(json.dumps(to_json(published))))
    assert read.model == PRESETS[name]() and read.experts == experts
    assert to_json(read) == to_json(published)


def test_what_we_write_for_k3_holds_the_official_values():
    ours, official = to_json(publish(k3(), bos=163584, eos=163586, pad=163839)), k3_document()
    kept_by_the_release = {"head_dim", "use_cache", "auto_map", "ignore_index", "media_placeholder_token_id",
                           "image_placeholder", "video_attn_type", "_attn_implementation"}  # fmt: skip
    for section in (lambda d: d, lambda d: d["text_config"], lambda d: d["vision_config"]):
        a, b = dict(section(ours)), dict(section(official))
        for table in (a, b):
            for key in ("text_config", "vision_config", "dtype"):
                table.pop(key, None)
        assert set(b) - set(a) <= kept_by_the_release
        assert {key: a[key] for key in b if key in a} == {key: b[key] for key in b if key in a}
        assert not set(a) - set(b)


# -- every field ----------------------------------------------------------------------------------------------------

CHANGES = [
    ("vocab_size", 1024, "vocab_size"), ("hidden_size", 64, "hidden_size"), ("intermediate_size", 96, "dense_size"),
    ("num_attention_heads", 4, "mla.num_heads"), ("hidden_act", "silu", "activation"),
    ("activation_situ_beta", 3.0, "situ_beta"), ("activation_situ_linear_beta", 20.0, "situ_linear_beta"),
    ("rms_norm_eps", 1e-6, "norm_eps"), ("initializer_range", 0.006, "init_range"), ("q_lora_rank", None, "mla.q_lora_rank"),
    ("kv_lora_rank", 256, "mla.kv_lora_rank"), ("qk_nope_head_dim", 32, "mla.qk_nope_head_dim"),
    ("qk_rope_head_dim", 16, "mla.qk_rope_head_dim"), ("v_head_dim", 24, "mla.v_head_dim"),
    ("mla_use_output_gate", False, "mla.output_gate"), ("num_experts", 32, "moe.num_experts"),
    ("num_experts_per_token", 3, "moe.experts_per_token"), ("num_shared_experts", 0, "moe.num_shared_experts"),
    ("moe_intermediate_size", 64, "moe.expert_size"), ("routed_expert_hidden_size", 32, "moe.latent_size"),
    ("latent_moe_use_norm", False, "moe.latent_norm"), ("moe_renormalize", False, "moe.renormalize"),
    ("routed_scaling_factor", 2.5, "moe.routed_scaling_factor"), ("first_k_dense_replace", 2, "dense_layers"),
    ("attn_res_block_size", 6, "attn_res_block_layers"), ("linear_attn_config.num_heads", 8, "kda.num_heads"),
    ("linear_attn_config.head_dim", 64, "kda.head_dim"), ("linear_attn_config.short_conv_kernel_size", 3, "kda.conv_kernel"),
    ("linear_attn_config.gate_lower_bound", -4.0, "kda.gate_lower_bound"),
    ("linear_attn_config.use_full_rank_gate", False, "kda.output_gate_rank"),
]  # fmt: skip
VISION_CHANGES = [
    ("patch_size", 16, "patch_size"), ("init_pos_emb_time", 2, "max_frames"), ("vt_num_attention_heads", 6, "num_heads"),
    ("vt_num_hidden_layers", 3, "num_layers"), ("vt_intermediate_size", 512, "mlp_size"), ("qkv_hidden_size", 768, "head_dim"),
    ("merge_kernel_size", [3, 3], "merge"),
]  # fmt: skip


def get(cfg, path):
    for name in path.split("."):
        cfg = getattr(cfg, name)
    return cfg


@pytest.mark.parametrize(("key", "value", "ours"), CHANGES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_text_field_reaches_the_model_and_comes_back(key, value, ours):
    document = k3_document()
    section, leaf = at(document["text_config"], key)
    section[leaf] = value
    if key == "num_attention_heads":
        section["num_key_value_heads"] = value
    if key == "linear_attn_config.num_heads":
        document["perilune"] = {"stored_heads": 16}
    model = from_json(document).model
    assert get(model, ours) != get(k3(), ours)
    assert to_json(from_json(document)) == document
    # Laid over the official document, the changed model changes these keys and no other.
    over = to_json(replace(from_json(k3_document()), model=model))
    if "text_hidden_size" in document["vision_config"]:
        assert {k: v for k, v in over.items() if k != "perilune"} == {
            k: v for k, v in document.items() if k != "perilune"
        }


@pytest.mark.parametrize(("key", "value", "ours"), VISION_CHANGES)
def test_every_vision_field_reaches_the_model_and_comes_back(key, value, ours):
    document = k3_document()
    document["vision_config"][key] = value
    assert get(from_json(document).model.vision, ours) != get(VisionConfig(), ours)
    assert to_json(from_json(document)) == document


@pytest.mark.parametrize("document", [k3_document(), linear_document(), flat_document()])
def test_every_single_key_may_not_be_misspelled(document):
    """A typo in any key is named together with the right spelling."""

    def keys(table, path=()):
        for key, value in table.items():
            yield (*path, key)
            if isinstance(value, dict) and key not in ("auto_map", "quantization_config"):
                yield from keys(value, (*path, key))

    for path in keys(document):
        broken = json.loads(json.dumps(document))
        section, leaf = at(broken, ".".join(path))
        section[leaf + "x"] = section.pop(leaf)
        if path[-1] in ("architectures", "model_type", "text_config"):
            continue  # what decides how the rest is read
        with pytest.raises(ConfigError, match=f"{leaf}x"):
            from_json(broken)


# -- ablations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixer": "gdn"}, "gdn"),
        ({"mixer": "softmax", "softmax": SoftmaxConfig(num_heads=2, head_dim=16)}, "softmax"),
        ({"residual": "full"}, "attn_res_block_layers=1"),
        ({"residual": "full_sublayer"}, "residual='full_sublayer'"),
        ({"residual": "plain"}, "residual='plain' with latent_size=32"),
        ({"moe": replace(tiny().moe, latent_size=None)}, "latent_size=None"),
        ({"moe": None, "dense_layers": 4}, "experts"),
        ({"kda": replace(tiny().kda, value_head_dim=24)}, r"kda\.value_head_dim=24 \(it would be read as None\)"),
        ({"kda": replace(tiny().kda, decay_rank=4)}, r"kda\.decay_rank=4"),
        ({"kda": replace(tiny().kda, output_gate_rank=4)}, r"kda\.output_gate_rank=4 \(it would be read as 16\)"),
        ({"mla": replace(tiny().mla, rope_theta=1e4)}, "rope_theta=10000"),
    ],
)
def test_parts_that_the_format_cannot_express_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        publish(replace(tiny(), **change))


@pytest.mark.parametrize(
    "change",
    [
        {"kda": replace(tiny().kda, output_gate_rank=16, gate_lower_bound=None, stored_heads=5)},
        {"mla": replace(tiny().mla, q_lora_rank=None, output_gate=False, lora_norm_eps=1e-5)},
        {"moe": replace(tiny().moe, balancer="sign", sign_update=0.01, balancer_ema=0.5, latent_norm=False, num_shared_experts=0)},
        {"activation": "swiglu"},
        {"situ_beta": 2.0, "situ_linear_beta": None},
        {"vision": VisionConfig(hidden_size=32, num_layers=2, num_heads=2, head_dim=16, mlp_size=64, norm_eps=0.0078125)},
        {"global_every": 1},
        {"global_every": 2, "dense_layers": 0},
    ],
)  # fmt: skip
def test_parts_that_the_format_or_our_own_table_expresses(change):
    cfg = replace(tiny(), **change)
    assert from_json(to_json(publish(cfg))).model == cfg


def test_settings_that_say_nothing_are_put_into_one_form():
    cfg = replace(
        tiny(), global_every=9, kda=replace(tiny().kda, value_head_dim=16, decay_rank=16, stored_heads=2),
        softmax=SoftmaxConfig(num_heads=2, head_dim=16),
    )  # fmt: skip
    assert cfg.layer_mixers == tiny().layer_mixers
    assert from_json(to_json(publish(cfg))).model == canonical(cfg) == tiny()


@st.composite
def models(draw):
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    flag = lambda: draw(st.booleans())  # noqa: E731
    k3_like, layers = flag(), number(2, 13)
    heads, size = number(1, 4), 4 * number(1, 8)
    every = number(1, layers)
    return canonical(
        ModelConfig(
            vocab_size=number(2, 999), hidden_size=number(1, 99), num_layers=layers, global_every=every,
            residual="block" if k3_like else "plain", attn_res_block_layers=number(1, 5), dense_layers=number(0, layers - 1),
            activation=draw(st.sampled_from(["situ", "swiglu"])), situ_beta=draw(st.sampled_from([4.0, 1.0, 2.5])),
            situ_linear_beta=draw(st.sampled_from([25.0, 10.0])), dense_size=number(1, 99), norm_eps=draw(st.floats(1e-8, 1)),
            kda=KDAConfig(num_heads=heads, head_dim=size, conv_kernel=number(1, 5), stored_heads=heads + number(0, 3),
                          gate_lower_bound=draw(st.sampled_from([None, -5.0, -1.5])),
                          output_gate_rank=draw(st.sampled_from([None, size]))),
            mla=MLAConfig(num_heads=number(1, 4), q_lora_rank=draw(st.sampled_from([None, 7])), kv_lora_rank=number(1, 9),
                          qk_nope_head_dim=number(1, 9), qk_rope_head_dim=number(0, 9), v_head_dim=number(1, 9),
                          output_gate=flag(), lora_norm_eps=draw(st.sampled_from([1e-6, 1e-5]))),
            moe=MoEConfig(num_experts=number(4, 9), experts_per_token=number(1, 3), num_shared_experts=number(0, 2),
                          expert_size=number(1, 9), latent_size=number(1, 9) if k3_like else None, latent_norm=flag(),
                          renormalize=flag(), routed_scaling_factor=draw(st.floats(0.1, 3)),
                          balancer=draw(st.sampled_from(["quantile", "sign", "none"]))),
        )
    )  # fmt: skip


@given(models())
def test_any_model_of_a_published_family_survives(cfg):
    document = to_json(publish(cfg))
    assert from_json(json.loads(json.dumps(document))).model == cfg
    assert to_json(from_json(document)) == document


# -- refusals -------------------------------------------------------------------------------------------------------


def changed(document, path, value):
    section, leaf = at(document, path)
    section[leaf] = value
    return document


BROKEN = [
    ("architectures", ["KimiK2ForCausalLM"], r"architectures=\['KimiK2ForCausalLM'\] is not known; perhaps"),
    ("model_type", "kimi_linear", "contradicts architectures"),
    ("text_config", None, "text_config"),
    ("text_config.hidden_act", "relu", "hidden_act='relu' is not implemented"),
    ("text_config.moe_router_activation_func", "softmax", "only 'sigmoid'"),
    ("text_config.mla_use_nope", False, "mla_use_nope=False is not implemented"),
    ("text_config.num_expert_group", 8, "num_expert_group=8 is not implemented"),
    ("text_config.moe_layer_freq", 2, "moe_layer_freq=2"),
    ("text_config.topk_method", "greedy", "topk_method='greedy'"),
    ("text_config.tie_word_embeddings", True, "tie_word_embeddings=True"),
    ("text_config.logit_scale", 0.5, "logit_scale=0.5"),
    ("text_config.num_key_value_heads", 8, "num_key_value_heads=8 contradicts"),
    ("text_config.hidden_size", "7168", "text_config.hidden_size='7168' must be of type int"),
    ("text_config.hidden_size", True, "must be of type int"),
    ("text_config.linear_attn_config.kda_layers", ["1", 2], r"kda_layers=\['1', 2\] must be a list"),
    ("text_config.attn_res_block_size", None, "residual='plain' with latent_size=3584 is in no published family"),
    ("text_config.linear_attn_config.gate_lower_bound", -7.0, r"\[-5, 0\)"),
    ("vision_config.pos_emb_interpolation_mode", "bicubic", "only 'bilinear'"),
    ("vision_config.init_pos_emb_width", 32, "init_pos_emb_width=32 contradicts"),
    ("vision_config.merge_kernel_size", [2, 3], r"merge_kernel_size=\[2, 3\]"),
    ("vision_config.qkv_hidden_size", 1537, "not a multiple"),
    ("vision_config.mm_hidden_size", 7, "mm_hidden_size=7 contradicts"),
    ("hidden_size", 1, "hidden_size=1 contradicts text_config.hidden_size=7168"),
    ("perilune", {"balncer": "sign"}, "perhaps you meant perilune.balancer"),
    ("text_config.quantization_config.quant_method", "gptq", "quant_method='gptq' is not implemented"),
    ("text_config.quantization_config.format", "nvfp4-pack-quantized", "nvfp4"),
    ("text_config.quantization_config.config_groups.group_0.weights.num_bits", 8, "num_bits=8"),
    ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16, "group_size=16"),
    ("text_config.quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}, "input_activations"),
    ("text_config.quantization_config.config_groups", {}, "config_groups"),
    ("text_config.quantization_config.bits", 4, "unknown field text_config.quantization_config.bits"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_what_we_do_not_implement_is_refused_by_name(path, value, message):
    with pytest.raises(ConfigError, match=message):
        from_json(changed(k3_document(), path, value))


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "rms_norm_eps", "num_experts", "routed_scaling_factor", "first_k_dense_replace", "mla_use_nope"],
)
def test_a_field_whose_default_differs_among_readers_must_be_there(key):
    document = k3_document()
    del document["text_config"][key]
    with pytest.raises(ConfigError, match=rf"text_config\.{key} is missing"):
        from_json(document)


@pytest.mark.parametrize(
    ("kda", "full", "message"),
    [
        ([n for n in range(92) if n % 4], [*range(0, 92, 4), 92], "counted from 1"),
        ([n for n in range(1, 93) if n % 4][1:], [*range(4, 93, 4), 93], r"look at \[1\]"),
        ([n for n in range(1, 93) if n % 4], [1, *range(4, 93, 4), 93], r"look at \[1\]"),
        ([*range(1, 94)], [], r"full_attn_layers=\[\] .* is not implemented"),
        ([n for n in range(1, 94) if n not in (5, 8, 93)], [5, 8, 93], r"full_attn_layers=\[5, 8, 93\]"),
    ],
)
def test_layer_patterns_that_we_cannot_express_are_named(kda, full, message):
    document = k3_document()
    document["text_config"]["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    with pytest.raises(ConfigError, match=message):
        from_json(document)


def test_layers_are_counted_from_one():
    """Trap 18 of the architecture notes: entry 4 is our layer 3; the last two layers are both MLA."""
    model = from_json(k3_document()).model
    assert [i for i, kind in enumerate(model.layer_mixers) if kind == "mla"] == [*range(3, 92, 4), 92]


def test_dispatch_is_on_the_top_level_architecture():
    document = k3_document()
    assert document["text_config"]["architectures"] == ["KimiLinearForCausalLM"]
    assert from_json(document).family == "kimi_k3"
    with pytest.raises(ConfigError, match="text_config"):
        from_json(
            document["text_config"] | {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
        )
    with pytest.raises(ConfigError, match="is that of kimi_linear, but"):
        from_json(document["text_config"])


@pytest.mark.parametrize("where", ["text", "top", "both"])
@pytest.mark.parametrize("per_group", [True, False])
def test_quantization_may_stand_in_three_places_and_keep_its_format_per_group(where, per_group):
    document = k3_document()
    block = json.loads(json.dumps(QUANTIZATION))
    if per_group:
        del block["format"]
    else:
        del block["config_groups"]["group_0"]["format"]
    del document["text_config"]["quantization_config"]
    if where != "top":
        document["text_config"]["quantization_config"] = block
    if where != "text":
        document["quantization_config"] = block
    published = from_json(document)
    assert published.experts == "mxfp4" and to_json(published) == document
    plain = to_json(replace(published, experts="bf16"))
    assert "quantization_config" not in plain and "quantization_config" not in plain["text_config"]
    assert from_json(plain).experts == "bf16"
    if where == "both":
        document["quantization_config"] = block | {"ignore": []}
        with pytest.raises(ConfigError, match="differ"):
            from_json(document)


def test_t_flat_schema_needs_its_layer_types():
    """transformers' default pattern (every i and i % 4 == 0) is not the released one, so it is never assumed."""
    document = flat_document()
    del document["layer_types"]
    with pytest.raises(ConfigError, match="layer_types is missing"):
        from_json(document)
    with pytest.raises(ConfigError, match="mlp_layer_types"):
        from_json(flat_document() | {"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 25})
    both = flat_document() | {"linear_attn_config": linear_document()["linear_attn_config"], "mla_use_nope": True}
    assert from_json(both).model == kimi_linear_48b() and to_json(from_json(both)) == both
    with pytest.raises(ConfigError, match="linear_num_heads=8 contradicts"):
        from_json(both | {"linear_num_heads": 8})
    with pytest.raises(ConfigError, match="num_local_experts=99 contradicts"):
        from_json(both | {"num_experts": 256, "num_local_experts": 99})


def test_a_changed_model_changes_the_flat_keys():
    published = from_json(flat_document())
    smaller = replace(published, model=replace(published.model, num_layers=5, dense_layers=2))
    document = to_json(smaller)
    assert document["layer_types"] == ["linear_attention"] * 3 + ["full_attention"] * 2
    assert document["mlp_layer_types"] == ["dense"] * 2 + ["sparse"] * 3
    assert "linear_attn_config" not in document and from_json(document).model == smaller.model


def test_generation_config_stops_at_the_end_of_a_message():
    found = generation_config(from_json(k3_document()))
    assert found == {
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "temperature": 1.0, "top_p": 1.0,
    }  # fmt: skip


def test_files_that_are_no_configuration(tmp_path):
    for content, message in (("{", "not valid JSON"), ("[]", "not a JSON object"), ("{}", "architectures=None")):
        path = tmp_path / "config.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.json")
