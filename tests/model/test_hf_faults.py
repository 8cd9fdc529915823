"""Bad published checkpoints: each is refused with names and values, the input is untouched, and nothing looks finished."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from published_folders import K3, files_of, random_tensors, write_folder
from safetensors.torch import load_file, save_file

from perilune.errors import CheckpointError, ConfigError, PeriluneError
from perilune.loading import convert, load_published, load_run

AT = "language_model.model.layers.1."
EXPERT = AT + "block_sparse_moe.experts.3.w2."
SHARD = "model-00002-of-00003.safetensors"


def change(name, make):
    """Replace, remove (None) or add a tensor before the folder is written."""

    def damage(folder):
        tensors = random_tensors(K3, True)
        value = make(tensors.get(name))
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
        write_folder(folder, K3, tensors=tensors)

    return damage


def edit_file(edit):
    def damage(folder):
        content = edit((folder / SHARD).read_bytes())
        (folder / SHARD).write_bytes(content)

    return damage


def edit_header(edit):
    """Change the header's JSON and keep the data."""

    def rewritten(content):
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        text = edit(header)
        text = text if isinstance(text, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return edit_file(rewritten)


def first(header):
    return next(told for name, told in header.items() if name != "__metadata__")


def edit_index(edit):
    def damage(folder):
        path = folder / "model.safetensors.index.json"
        told = json.loads(path.read_text())
        edit(told["weight_map"])
        path.write_text(json.dumps(told))

    return damage


def twice(folder):
    other = load_file(folder / "model-00001-of-00003.safetensors")
    name = next(iter(other))
    part = load_file(folder / SHARD) | {name: other[name]}
    save_file(part, folder / SHARD)


def twice_in_one_header(folder):
    def edit(header):
        text = json.dumps(header)
        name = next(n for n in header if n != "__metadata__")
        return (text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode()

    edit_header(edit)(folder)


def nan_scale(value):
    value = value.clone()
    value[2, 0] = 255
    return value


NORM = AT + "input_layernorm.weight"
FAULTS = {
    "cut shard": (edit_file(lambda b: b[:-7]), rf"{SHARD} has [\d,]+ bytes, its tensors need [\d,]+: the file was cut"),
    "longer shard": (edit_file(lambda b: b + b"xxxx"), r"its tensors need [\d,]+: the file was written over"),
    "empty shard": (edit_file(lambda b: b""), "its header should have 0 bytes, the file has 0"),
    "header longer than the file": (
        edit_file(lambda b: struct.pack("<Q", 1 << 40) + b[8:]), "header should have 1,099,511,627,776 bytes, the file has",
    ),
    "header is not JSON": (edit_header(lambda h: b"{no json}"), "its header is not valid JSON"),
    "offsets of another size": (edit_header(lambda h: first(h).update(shape=[3, 3])), r"needs \d+ bytes, its header gives it"),
    "offsets that overlap": (
        edit_header(lambda h: first(h).update(data_offsets=[4 + x for x in first(h)["data_offsets"]])), "begins at byte",
    ),
    "entry without shape": (edit_header(lambda h: first(h).pop("shape")), "the header's entry for .* is damaged"),
    "unknown dtype": (edit_header(lambda h: first(h).update(dtype="F4")), "has the dtype 'F4'"),
    "negative size": (edit_header(lambda h: first(h).update(shape=[-1, 8])), "needs -"),
    "name twice in a header": (twice_in_one_header, "appears twice"),
    "fp16 weights": (change(NORM, lambda t: t.half()), rf"{NORM} is F16 instead of BF16"),
    "int8 codes": (change(EXPERT + "weight_packed", lambda t: t.view(torch.int8)), "weight_packed is I8 instead of U8"),
    "fp32 scales": (change(EXPERT + "weight_scale", lambda t: t.float()), "weight_scale is F32 instead of U8"),
    "missing tensor": (change(NORM, lambda t: None), rf"missing: {NORM}"),
    "missing scale": (change(EXPERT + "weight_scale", lambda t: None), rf"missing: {EXPERT}weight_scale"),
    "extra tensor": (change(AT + "self_attn.q_proj.bias", lambda t: torch.ones(3)), r"not part of this model: .*q_proj\.bias"),
    "two spellings": (
        change("language_model.layers.1.input_layernorm.weight", lambda t: torch.ones(64).bfloat16()), "stored twice",
    ),
    "other shape": (change(NORM, lambda t: torch.ones(63).bfloat16()), r"has the shape \[63\] instead of \[64\]"),
    "other rank": (change(NORM, lambda t: t[None]), r"has the shape \[1, 64\] instead of \[64\]"),
    "A_log shorter than the heads": (change(AT + "self_attn.A_log", lambda t: t[:1]), r"A_log has the shape \[1\] instead of \[5\]"),
    "NaN scale": (
        change(EXPERT + "weight_scale", nan_scale), rf"{EXPERT}weight_scale has 1 of 32 scales that are NaN \(byte 255\), the first at \[2, 0\]",
    ),
    "tensor in two shards": (twice, r"is in two files, model-00001-of-00003.safetensors and model-00002"),
    "index points to nothing": (edit_index(lambda m: m.update({NORM: "model-00009.safetensors"})), "points to model-00009.safetensors"),
    "index points elsewhere": (edit_index(lambda m: m.update({NORM: "../x.safetensors"})), "a folder in it"),
    "index names too much": (edit_index(lambda m: m.update({"ghost": SHARD})), r"not in the file it gives: ghost \(model-00002"),
    "missing file": (lambda f: (f / SHARD).unlink(), f"points to {SHARD}, which is not there"),
    "index is no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "is no index"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "has no weights"),
    "config of another size": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace('"intermediate_size": 128', '"intermediate_size": 96')),
        r"mlp\.gate_proj\.weight has the shape \[128, 64\] instead of \[96, 64\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_checkpoint_is_refused_by_name(tmp_path, fault):
    damage, message = FAULTS[fault]
    folder = tmp_path / "in"
    write_folder(folder, K3)
    damage(folder)
    before = files_of(folder)
    for attempt in (lambda: convert(folder, tmp_path / "out"), lambda: load_published(folder)):
        with pytest.raises(CheckpointError, match=message):
            attempt()
    assert files_of(folder) == before
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out.partial/config.*")) and not list(
        tmp_path.glob("out.partial/checkpoints/*/state.json")
    )


def test_a_repaired_source_is_not_continued_from_the_damaged_one(tmp_path):
    damage, _ = FAULTS["NaN scale"]
    damage(tmp_path / "in")
    with pytest.raises(CheckpointError, match="NaN"):
        convert(tmp_path / "in", tmp_path / "out")
    write_folder(tmp_path / "in", K3)
    with pytest.raises(CheckpointError, match="left over from another conversion"):
        convert(tmp_path / "in", tmp_path / "out")


def test_many_problems_are_counted(tmp_path):
    tensors = {name: value for name, value in random_tensors(K3, True).items() if ".experts.5." not in name}
    write_folder(tmp_path / "in", K3, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"missing: .*experts\.5\..* and 20 more"):
        convert(tmp_path / "in", tmp_path / "out")


def test_weights_that_are_not_finite_are_not_quantised(tmp_path):
    tensors = random_tensors(K3, False)
    tensors[EXPERT + "weight"][3, 4] = float("inf")
    write_folder(tmp_path / "in", K3, packed=False, tensors=tensors)
    with pytest.raises(CheckpointError, match=rf"{EXPERT}weight has 1 values that are NaN or infinite"):
        convert(tmp_path / "in", tmp_path / "out", to="kimi-k3", experts="mxfp4")
    convert(tmp_path / "in", tmp_path / "wide", to="kimi-k3")


def test_files_that_contradict_the_quantisation_of_config_json_win(tmp_path):
    write_folder(tmp_path / "in", K3, packed=True)
    document = json.loads((tmp_path / "in" / "config.json").read_text())
    del document["text_config"]["quantization_config"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(document))
    done = convert(tmp_path / "in", tmp_path / "out", to="kimi-k3")
    assert done.experts == "mxfp4" and any("the files count" in note for note in done.notes)
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]


def test_a_folder_that_is_nothing(tmp_path):
    with pytest.raises(PeriluneError, match="no run in"):
        convert(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"architectures=\['LlamaForCausalLM'\] is not known"):
        convert(tmp_path / "in", tmp_path / "out")


def test_loading_needs_a_tokenizer_that_fits(tmp_path):
    write_folder(tmp_path / "in", K3, tokenizer=False)
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        load_run(tmp_path / "in")
    small = replace(K3, vocab_size=100)
    write_folder(tmp_path / "small", small)
    with pytest.raises(CheckpointError, match=r"has \d+ ids, its model only 100"):
        load_run(tmp_path / "small")
    with pytest.raises(CheckpointError, match="no step 3"):
        load_run(tmp_path / "small", step=3)


def test_a_run_without_a_published_family_says_which_part(tmp_path):
    from published_folders import write_run

    from perilune.config.presets import k2_nano

    write_run(tmp_path / "run", replace(k2_nano(), vocab_size=320))
    with pytest.raises(ConfigError, match="published checkpoints have kda and mla layers"):
        convert(tmp_path / "run", tmp_path / "out")
