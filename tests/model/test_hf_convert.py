"""Conversions: bitwise round trips, experts in both forms, tolerances of loaders, kills, full disks, existing folders."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published_folders import K3, LINEAR, files_of, random_tensors, read_all, same, write_folder, write_run
from safetensors.torch import load_file

from perilune.config import DataConfig, QuantConfig, VisionDataConfig
from perilune.config.published import from_json
from perilune.data.image.published import FILE, read_document
from perilune.errors import CapacityError, CheckpointError, ConfigError
from perilune.loading import convert, load_published, load_run
from perilune.model.hf import PublishedSource
from perilune.model.hf.shard_file import Planned, aligned, read_header, write_shard
from perilune.ops.mx import dequantize_mxfp4
from perilune.serve.run_engine import load_engine

WEIGHTS = "checkpoints/step-00000000"


@pytest.mark.parametrize(
    ("cfg", "packed"), [(K3, True), (K3, False), (LINEAR, False)], ids=["k3-mxfp4", "k3", "linear"]
)
def test_import_and_export_give_the_same_bits(tmp_path, cfg, packed):
    """Random codes (zero blocks of both signs, blocks of small codes), all 5 entries of A_log, every dtype."""
    tensors = write_folder(tmp_path / "in", cfg, packed=packed)
    before = files_of(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "run", verify=True)
    done = convert(tmp_path / "run", tmp_path / "out", verify=True)
    assert done.experts == ("mxfp4" if packed else "bf16"), "the run remembers how the experts were published"
    assert same(read_all(tmp_path / "out"), tensors)
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(before[name])
    assert files_of(tmp_path / "in") == before
    convert(tmp_path / "out", tmp_path / "run2")
    convert(tmp_path / "run2", tmp_path / "out2")
    a, b = files_of(tmp_path / "out"), files_of(tmp_path / "out2")
    assert a == b
    sums = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True)
    assert sums.returncode == 0, sums.stdout


def test_experts_decode_to_bf16_and_back(tmp_path):
    tensors = write_folder(tmp_path / "in", K3, packed=True)
    convert(tmp_path / "in", tmp_path / "wide", to="kimi-k3", experts="bf16")
    wide = read_all(tmp_path / "wide")
    base = "language_model.model.layers.2.block_sparse_moe.experts.3.w2."
    decoded = dequantize_mxfp4(tensors[base + "weight_packed"], tensors[base + "weight_scale"])
    assert torch.equal(wide[base + "weight"], decoded)
    document = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert from_json(document).experts == "bf16" and from_json(document).model == K3
    # Encoding again chooses its own scales: the same values, and from then on the same bits.
    convert(tmp_path / "wide", tmp_path / "packed", to="kimi-k3", experts="mxfp4")
    convert(tmp_path / "packed", tmp_path / "wide2", to="kimi-k3", experts="bf16")
    assert same(read_all(tmp_path / "wide2"), wide)
    convert(tmp_path / "wide2", tmp_path / "packed2", to="kimi-k3", experts="mxfp4")
    assert same(read_all(tmp_path / "packed2"), read_all(tmp_path / "packed"))


def test_kimi_linear_experts_may_be_packed_too(tmp_path):
    cfg = replace(LINEAR, hidden_size=64, moe=replace(LINEAR.moe, expert_size=32))
    write_run(tmp_path / "run", cfg)
    convert(tmp_path / "run", tmp_path / "out", experts="mxfp4")
    assert load_published(tmp_path / "out").config.model == cfg
    with pytest.raises(ConfigError, match="needs a multiple of 32"):
        write_run(tmp_path / "run2", LINEAR)
        convert(tmp_path / "run2", tmp_path / "out2", experts="mxfp4")
    assert not (tmp_path / "out2.partial").exists()


def test_a_trained_expert_does_not_get_its_old_scales(tmp_path):
    """Kept scales serve only while they express the weights exactly."""
    write_folder(tmp_path / "in", K3, packed=True)
    convert(tmp_path / "in", tmp_path / "run")
    folder = tmp_path / "run" / WEIGHTS
    source = read_all(folder)
    from perilune import checkpoint
    from perilune.rundir import RunDir

    model = {name: tensor.float() for name, tensor in source.items() if not name.endswith("weight_scale")}
    model["layers.1.ffn.experts.w1"] *= 1.01
    checkpoint.save(RunDir(tmp_path / "run"), 5, model=model, optimizer={}, state={})
    convert(tmp_path / "run", tmp_path / "out", experts="mxfp4")
    packed = read_all(tmp_path / "out")
    base = "language_model.model.layers.1.block_sparse_moe.experts.0.w1."
    decoded = dequantize_mxfp4(packed[base + "weight_packed"], packed[base + "weight_scale"], torch.float32)
    wanted = model["layers.1.ffn.experts.w1"][0]
    assert (decoded - wanted).abs().max() < 0.3 * wanted.abs().max()
    convert(tmp_path / "run", tmp_path / "old", experts="mxfp4", step=0)
    old = read_all(tmp_path / "old")
    assert same(old, random_tensors(K3, True))


def test_an_fp32_run_is_rounded_once_and_then_stays(tmp_path):
    model = write_run(tmp_path / "run", replace(K3, vision=None))
    convert(tmp_path / "run", tmp_path / "out")
    tensors = read_all(tmp_path / "out")
    name = "language_model.model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(tensors[name], model.layers[1].mixer.o_proj.weight.detach().bfloat16())
    assert torch.equal(tensors["language_model.model.layers.1.self_attn.A_log"], model.layers[1].mixer.A_log.detach())
    loaded = load_run(tmp_path / "out").model.state_dict()
    convert(tmp_path / "out", tmp_path / "run2")
    again = load_run(tmp_path / "run2").model.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(loaded[key], again[key])
        f32 = key.endswith(("qkv_conv", "A_log", "dt_bias", "o_norm", "router.bias"))
        assert torch.equal(loaded[key], value if f32 else value.bfloat16().float()), key


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_a_quantised_run_is_exported_as_it_was_trained(tmp_path, rule):
    cfg = replace(K3, vision=None, moe=replace(K3.moe, expert_size=32, latent_size=32))
    write_run(tmp_path / "run", cfg, quant=QuantConfig(weights="mxfp4", rule=rule))
    assert convert(tmp_path / "run", tmp_path / "out").experts == "mxfp4"
    ours, theirs = (load_run(tmp_path / name).model.moe_layers()[0].experts for name in ("run", "out"))
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, dict(theirs.named_parameters())[name]), name


@pytest.mark.parametrize("to", ["published", "native"])
def test_the_text_of_a_loaded_model_does_not_depend_on_the_form(tmp_path, to):
    write_folder(tmp_path / "in", K3, packed=True)
    convert(
        tmp_path / "in",
        tmp_path / "out",
        to="native" if to == "native" else "kimi-k3",
        experts=None if to == "native" else "bf16",
    )
    ids = torch.arange(20)[None]
    with torch.no_grad():
        a = load_run(tmp_path / "in").model(ids).logits_BTZ
        b = load_run(tmp_path / "out").model(ids).logits_BTZ
    assert torch.equal(a, b)


# -- what loaders tolerate ------------------------------------------------------------------------------------------


def test_tolerated_deviations_are_read_and_noted(tmp_path):
    tensors = write_folder(tmp_path / "plain", K3)
    other = {}
    for name, value in tensors.items():
        if ".layers.0." in name:
            name = name.replace("language_model.model.", "language_model.")
        if name.endswith("weight_scale") and ".layers.1." in name:
            value = value[:, None, :, None]
        other[name] = value
    other["language_model.model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    other["language_model.model.layers.5.eh_proj.weight"] = torch.ones(64, 128, dtype=torch.bfloat16)
    other["language_model.model.layers.5.enorm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    write_folder(tmp_path / "odd", K3, tensors=other)
    document = json.loads((tmp_path / "odd" / "config.json").read_text())
    document["text_config"]["num_nextn_predict_layers"] = 1
    (tmp_path / "odd" / "config.json").write_text(json.dumps(document))
    done = convert(tmp_path / "odd", tmp_path / "out", to="kimi-k3")
    assert same(read_all(tmp_path / "out"), tensors)
    assert any("rotary" in note for note in done.notes)
    assert any("2 tensors of layer 5" in note and "multi-token" in note for note in done.notes)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"]["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("length", [2, 3, 7])
def test_the_length_of_a_log_is_that_of_the_file(tmp_path, length):
    tensors = random_tensors(replace(K3, kda=replace(K3.kda, stored_heads=length)), True)
    write_folder(tmp_path / "in", K3, tensors=tensors)
    source = PublishedSource(tmp_path / "in")
    assert (source.published.model.kda.stored_heads or 2) == length
    convert(tmp_path / "in", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "out")
    assert same(read_all(tmp_path / "out"), tensors), "entries beyond the heads are kept as they are"


def test_a_single_file_without_an_index_is_enough(tmp_path):
    tensors = write_folder(tmp_path / "in", LINEAR, shards=1)
    (tmp_path / "in" / "model.safetensors.index.json").unlink()
    (tmp_path / "in" / "model-00001-of-00001.safetensors").rename(tmp_path / "in" / "model.safetensors")
    convert(tmp_path / "in", tmp_path / "out", to="kimi-linear")
    assert same(read_all(tmp_path / "out"), tensors)


def test_documents_beside_the_weights_travel_both_ways(tmp_path):
    write_folder(tmp_path / "in", K3)
    extra = {
        "chat_template.jinja": "{{ x }}",
        "preprocessor_config.json": "{}",
        "generation_config.json": '{"temperature": 0.5}',
    }
    for name, text in extra.items():
        (tmp_path / "in" / name).write_text(text)
    convert(tmp_path / "in", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "out")
    for name, text in extra.items():
        assert (tmp_path / "out" / name).read_text() == text


def test_an_export_of_ours_brings_generation_config_and_tokenizer_class(tmp_path):
    from perilune.tokenizer import train_bpe

    write_run(tmp_path / "run", replace(K3, vision=None))
    train_bpe(["a few words of text, again and again"] * 9, 320).save(tmp_path / "run" / "tokenizer.json")
    convert(tmp_path / "run", tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": 288,
        "eos_token_id": 290,
        "pad_token_id": 319,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_run(tmp_path / "out").tokenizer
    assert theirs.encode("a few words", add_special_tokens=False) == ours.encode("a few words")
    assert theirs.eos_token == "<|end_of_msg|>" and theirs.eos_token_id == 290


def test_tensors_begin_at_multiples_of_their_element_size(tmp_path):
    values = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.ones(3).bfloat16(),
        "c": torch.rand(2, 2),
        "d": torch.zeros(0),
    }
    names = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32"}
    planned = [
        Planned(n, names[v.dtype], tuple(v.shape), lambda v=v: v.reshape(-1).split(2)) for n, v in values.items()
    ]
    told = write_shard(tmp_path / "x.safetensors", aligned(planned))
    assert told["bytes"] == (tmp_path / "x.safetensors").stat().st_size
    for entry in read_header(tmp_path / "x.safetensors").values():
        assert entry.begin % (entry.nbytes // max(entry.count, 1) or 1) == 0
    assert same(load_file(tmp_path / "x.safetensors"), values)


# -- interruptions --------------------------------------------------------------------------------------------------

CHILD = """
import json, os, signal, sys
from perilune.loading import conversion
calls = 0
def point(real, stop):
    def wrapped(*args):
        global calls
        calls += 1
        if calls == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    return wrapped
for source, out, stops in json.loads(sys.argv[1]):
    for stop in stops:
        if os.path.exists(out):
            break
        child = os.fork()
        if child == 0:
            os.fsync, conversion.Path.rename = point(os.fsync, stop), point(conversion.Path.rename, stop)
            conversion.convert(source, out)
            os._exit(0)
        print(out, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.soak
def test_kill_9_anywhere_and_the_same_command_again_gives_the_same_bytes(tmp_path, count):
    """A child is killed before its n-th sync or rename; the next one goes on and is killed further on."""
    published, native = tmp_path / "published", tmp_path / "native"
    write_folder(published, K3)
    convert(published, native)
    whole = {native: published, published: native}
    before = {folder: files_of(folder) for folder in whole}
    convert(native, tmp_path / "again")
    before[tmp_path / "again"] = files_of(tmp_path / "again")
    trials = [
        (source, tmp_path / f"{source.name}{n}", [3 + (7 * n + 13 * kill) % 31 for kill in range(6)])
        for n in range(count(full=40, reduced=1)) for source in whole
    ]  # fmt: skip
    told = json.dumps([[str(source), str(out), stops] for source, out, stops in trials])
    child = subprocess.run([sys.executable, "-c", CHILD, told], capture_output=True, timeout=250, text=True)
    assert child.returncode == 0, child.stderr
    ends = [line.split() for line in child.stdout.splitlines()]
    assert {int(code) for _, code in ends} <= {0, -signal.SIGKILL}, child.stderr
    for source, out, _ in trials:
        codes = [int(code) for name, code in ends if name == str(out)]
        assert codes[0] == -signal.SIGKILL, codes
        if not out.exists():
            partial = out.with_name(out.name + ".partial")
            assert not (partial / "config.toml").exists() and not (partial / "config.json").exists()
            assert convert(source, out).reused_files > 0
        a, b = files_of(out), dict(before[native if source == published else tmp_path / "again"])
        for table in (a, b):
            table.pop(".convert.json", None)  # a kill after the last rename leaves these two
            table.pop(".lock", None)
            table.pop("config.toml", None)  # it names the tokenizer by its path
        assert a == b and files_of(source) == before[source]


@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_a_full_disk_leaves_no_folder_and_the_rest_follows(tmp_path, monkeypatch, call):
    write_folder(tmp_path / "in", K3)
    before, real, calls = files_of(tmp_path / "in"), os.fsync, 0

    def full(handle):
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="no disk space left"):
        convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial" / "config.toml").exists()
    monkeypatch.undo()
    assert files_of(tmp_path / "in") == before
    convert(tmp_path / "in", tmp_path / "out")
    assert load_run(tmp_path / "out").config.model == K3


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    write_folder(tmp_path / "in", K3)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CapacityError, match=r"needs [\d,]+ more bytes, the disk has 1,000 free"):
        convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list((tmp_path / "out.partial").rglob("*.safetensors"))


def test_an_existing_folder_is_never_touched(tmp_path):
    write_folder(tmp_path / "in", K3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="out exists"):
        convert(tmp_path / "in", tmp_path / "out")
    assert files_of(tmp_path / "out") == {"mine.txt": b"x"}
    with pytest.raises(CheckpointError, match="is not a folder"):
        convert(tmp_path / "in", tmp_path / "no" / "out")


def test_a_partial_folder_of_another_conversion_is_refused(tmp_path, monkeypatch):
    write_folder(tmp_path / "in", K3)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not from a conversion"):
        convert(tmp_path / "in", tmp_path / "out")
    shutil.rmtree(tmp_path / "out.partial")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1))
    with pytest.raises(CapacityError):
        convert(tmp_path / "in", tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="left over from another conversion"):
        convert(tmp_path / "in", tmp_path / "out", to="kimi-k3", experts="bf16")
    convert(tmp_path / "in", tmp_path / "out")


def test_two_conversions_into_one_folder_exclude_each_other(tmp_path):
    import fcntl

    write_folder(tmp_path / "in", K3)
    (tmp_path / "out.partial").mkdir()
    with (tmp_path / "out.partial" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process converts"):
            convert(tmp_path / "in", tmp_path / "out")


def test_verify_finds_a_file_that_reads_back_differently(tmp_path, monkeypatch):
    import perilune.loading.conversion as module

    write_folder(tmp_path / "in", K3)
    real = module.write_shard

    def flips(path: Path, tensors, on_bytes):
        entry = real(path, tensors, on_bytes)
        if "00002" in path.name:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        return entry

    monkeypatch.setattr(module, "write_shard", flips)
    with pytest.raises(CheckpointError, match="model-00002-of-00008.safetensors was written with the sha256"):
        convert(tmp_path / "in", tmp_path / "out", to="kimi-k3", verify=True)
    monkeypatch.undo()
    finished = {path.name: path.stat().st_ino for path in (tmp_path / "out.partial").glob("*.safetensors")}
    done = convert(tmp_path / "in", tmp_path / "out", to="kimi-k3", verify=True)
    assert done.verified and done.reused_files == len(finished) == 7
    now = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.safetensors")}
    assert {name: now[name] for name in finished} == finished, "finished files are not written again"
    path = tmp_path / "out" / "model-00003-of-00008.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="model-00003-of-00008.safetensors has the sha256"):
        convert(tmp_path / "out", tmp_path / "again", verify=True)
    assert load_file(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gguf"}, "allowed: kimi-k3, kimi-linear, native"),
        ({"experts": "int4"}, "allowed: mxfp4, bf16"),
        ({"to": "kimi-linear"}, "family kimi_k3; it cannot become kimi-linear"),
        ({"experts": "mxfp4", "to": "native"}, "stores its experts in bf16"),
        ({"step": 3}, "it has no step 3"),
    ],
)
def test_requests_that_cannot_be_met(tmp_path, options, message):
    write_folder(tmp_path / "in", K3)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "in", tmp_path / "out", **options)
    assert {p.name for p in tmp_path.iterdir()} == {"in"}


def test_a_run_or_one_of_its_checkpoints_is_a_source(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "mine", LINEAR)
    monkeypatch.chdir(tmp_path)
    convert("mine", "a")
    convert("runs/mine/checkpoints/step-00000007", "b", to="kimi-linear")
    assert files_of(Path("a")) == files_of(Path("b"))
    with pytest.raises(ConfigError, match="native already"):
        convert("mine", "c", to="native")
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        convert("mine", "c", step=3)
    with pytest.raises(CheckpointError, match="no run in"):
        convert("nobody", "c")


def test_the_sizes_of_pictures_go_along(tmp_path):
    """A run's sizes of pictures are in its published form, and in what is made from that; a file that is there stays."""
    data = DataConfig(vision=VisionDataConfig(share=0.5, image_size=4 * K3.vision.patch_size))
    write_run(tmp_path / "run", K3, data=data)
    convert(tmp_path / "run", tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again")
    for folder in (tmp_path / "out", tmp_path / "again" / "published"):
        assert read_document(folder / FILE).in_patch_limit == 16
    path = tmp_path / "out" / FILE
    path.write_text(path.read_text().replace('"in_patch_limit": 16', '"in_patch_limit": 12'))
    convert(tmp_path / "out", tmp_path / "wide", to="kimi-k3", experts="bf16")
    assert (tmp_path / "wide" / FILE).read_bytes() == path.read_bytes()
    for folder, limit in (("wide", 12), ("again", 16)):
        with contextlib.closing(load_engine(tmp_path / folder, device="cpu", context_length=64)) as engine:
            assert engine.images.processor.cfg.in_patch_limit == limit
