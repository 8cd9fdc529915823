"""What a run leaves in its folder, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from perilune.config import CheckpointConfig, EvalConfig, OptimConfig
from perilune.errors import CapacityError, CheckpointError, RequestError
from perilune.loading import load_run
from perilune.optim.schedule import multiplier
from perilune.rundir import RunDir
from perilune.train.callbacks import Callback
from perilune.train.heldout import score_held_out
from perilune.train.nonfinite import DivergedError
from perilune.train.resume import FREE

GOLDEN = Path(__file__).parents[1] / "golden" / "loss_tiny.json"


def test_records_of_a_run(undisturbed, config):
    records = undisturbed.read_metrics("train")
    assert [r["step"] for r in records] == list(range(1, 9))
    assert [r["tokens"] for r in records] == [256 * n for n in range(1, 9)]
    assert [r["seq_len"] for r in records] == [32] * 4 + [64] * 4, "the second stage has longer windows, as many tokens"
    for index, record in enumerate(records):
        assert record["lr_muon"] == pytest.approx(0.02 * multiplier(index, 8))
        assert record["lr_adamw"] == pytest.approx(0.006 * multiplier(index, 8))
        assert len(record["routing_max_over_mean"]) == 3 and min(record["routing_max_over_mean"]) >= 1.0
        assert record["grad_norm"] > 0 and record["mfu"] > 0
    (evaluation,) = undisturbed.read_metrics("eval")
    assert evaluation["step"] == 8 and evaluation["tokens"] == 300
    assert evaluation["bits_per_byte"] == pytest.approx(evaluation["nats"] / np.log(2) / evaluation["bytes"])
    (sample,) = undisturbed.read_metrics("sample")
    assert sample["prompt"] and isinstance(sample["text"], str)


def test_files_of_a_run(undisturbed, config):
    summary = undisturbed.read_json("summary.json")
    assert summary["finished"] and summary["stopped_by"] == "steps"
    assert summary["train"]["steps"] == 8 and summary["train"]["tokens"] == 2048
    assert summary["train"]["loss_first"] > summary["train"]["loss_last"]
    assert summary["train"]["val_bits_per_byte"] == undisturbed.read_metrics("eval")[-1]["bits_per_byte"]
    assert summary["routing"]["max_over_mean"] >= summary["routing"]["pooled_worst_layer"] * 0.5 >= 0.5
    split = undisturbed.read_json("split.json")
    assert len(split["held_out_names"]) == split["held_out"]["documents"] >= 1
    assert split["train"]["bytes"] > split["held_out"]["bytes"] > 0
    environment = undisturbed.read_json("environment.json")
    assert environment["precision"] == "float32" and environment["precision_reason"] == "asked for"
    assert undisturbed.read_config() == config


def test_probes_are_arrays_without_objects(undisturbed):
    (path,) = (undisturbed.path / "probes").iterdir()
    assert path.name == "step-00000008.npz"
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["routing_counts"].shape == (3, 8)
        assert arrays["kda_half_life"].shape == (3, 2, 16)
        assert arrays["mla_max_logit"].shape == (1, 2)
        assert arrays["attnres_sites"].tolist()[-1] == "output"
        assert arrays["router_bias"].shape == (3, 8) and np.abs(arrays["router_bias"]).max() > 0


def test_a_loaded_run_scores_as_the_trainer_did(undisturbed, start):
    loaded = load_run(undisturbed.path)
    assert not loaded.model.training
    trainer = start("undisturbed", None, resume=True)
    result = score_held_out(loaded.model, trainer.data.held_out, trainer.data.token_bytes, max_tokens=300)
    assert result.bits_per_byte == undisturbed.read_json("summary.json")["train"]["val_bits_per_byte"]
    trainer._held.close()
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; there are: 8"):
        load_run(undisturbed.path, step=5)


def test_a_run_is_a_function_of_its_seed(start, config, undisturbed):
    losses = [r["loss"] for r in undisturbed.read_metrics("train")]
    again = start("again", config)
    again.fit()
    assert [r["loss"] for r in again.run.read_metrics("train")] == losses
    other = start("other", replace(config, seed=4))
    other.fit()
    assert [r["loss"] for r in other.run.read_metrics("train")] != losses


def test_callbacks_do_not_change_a_run(start, config, undisturbed):
    busy = replace(
        config,
        checkpoint=CheckpointConfig(every=3),
        eval=EvalConfig(every=2, tokens=100, final_tokens=300),
        probe_every=2,
    )
    trainer = start("busy", busy)
    trainer.fit()
    losses = [r["loss"] for r in undisturbed.read_metrics("train")]
    assert [r["loss"] for r in trainer.run.read_metrics("train")] == losses
    assert [r["step"] for r in trainer.run.read_metrics("eval")] == [2, 4, 6, 8]
    assert [r["step"] for r in trainer.run.read_metrics("sample")] == [2, 4, 6, 8]
    assert sorted(p.name for p in (trainer.run.path / "probes").iterdir()) == [
        f"step-0000000{n}.npz" for n in (2, 4, 6, 8)
    ]
    assert [s for s, _ in trainer.run.checkpoints()] == [6, 8]


def test_log_every_thins_the_train_records_only(start, with_):
    trainer = start("thin", with_(log_every=3, eval=EvalConfig(every=2, tokens=50, final_tokens=50)))
    trainer.fit()
    assert [r["step"] for r in trainer.run.read_metrics("train")] == [1, 3, 6, 8]
    assert [r["step"] for r in trainer.run.read_metrics("eval")] == [2, 4, 6, 8]


class Poison(Callback):
    """Makes a weight NaN after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, record) -> None:
        if trainer.step == self.step:
            with torch.no_grad():
                trainer.model.layers[1].ffn.shared.up_proj.weight[0, 0] = float("nan")


def test_a_nan_stops_the_run_and_keeps_the_last_good_checkpoint(start, with_):
    trainer = start("nan", with_(checkpoint=CheckpointConfig(every=2)), callbacks=[Poison(5)])
    with pytest.raises(DivergedError) as caught:
        trainer.fit()
    message = str(caught.value)
    assert message.startswith("step 6: the loss is nan")
    assert "layers.1.ffn.shared.up_proj.weight (1 of" in message
    assert "step-00000004" in message and "optim.lr_muon (now 0.02)" in message
    assert [s for s, _ in trainer.run.checkpoints()] == [2, 4]
    assert not (trainer.run.path / "summary.json").exists()
    again = start("nan", None, resume=True)
    assert again.step == 4
    assert again.fit().finished


def test_a_full_disk_loses_nothing(start, with_, monkeypatch):
    trainer = start("full", with_(checkpoint=CheckpointConfig(every=2)))

    class Fill(Callback):
        def on_step(self, trainer, record) -> None:
            if trainer.step == 4:

                def full(_fd):
                    raise OSError(errno.ENOSPC, "No space left on device")

                monkeypatch.setattr(os, "fsync", full)

    trainer.callbacks.append(Fill())
    with pytest.raises(CapacityError, match="no disk space left"):
        trainer.fit()
    monkeypatch.undo()
    assert [s for s, _ in trainer.run.checkpoints()] == [2]
    assert start("full", None, resume=True).fit().finished


def test_signals_are_given_back(start, config):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    start("signals", replace(config, steps=1)).fit()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_sigterm_saves_like_ctrl_c_and_a_second_one_does_not_wait(start, config):
    class Terminate(Callback):
        def __init__(self, times: int) -> None:
            self.times = times

        def on_step(self, trainer, record) -> None:
            for _ in range(self.times if trainer.step == 2 else 0):
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = start("once", config, callbacks=[Terminate(1)])
    assert trainer.fit().stopped_by == "interrupt"
    assert trainer.run.latest_checkpoint() == trainer.run.checkpoint_path(2)
    assert trainer.run.read_metrics("eval") == [], "an interrupted run does not keep its user waiting"
    with pytest.raises(KeyboardInterrupt):
        start("twice", config, callbacks=[Terminate(2)]).fit()


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00bad"])
def test_bad_text_leaves_no_run_behind(start, with_, tmp_path, content):
    folder = tmp_path / "text"
    folder.mkdir()
    if content is not None:
        (folder / "a.txt").write_bytes(content)
    config = with_(data=replace(with_().data, path=(str(folder),)))
    with pytest.raises(RequestError):
        start("bad", config)
    assert not (tmp_path / "bad").exists(), "the same command works once the text is mended"


def test_an_optimizer_of_each_kind_trains_and_resumes(start, with_):
    for name in ("muon_whole", "adamw"):
        trainer = start(name, with_(optim=OptimConfig(name=name), steps=2))
        assert trainer.fit().finished
        again = start(name, None, resume=True)
        for key, tensor in trainer.optimizer.state_tensors().items():
            assert torch.equal(again.optimizer.state_tensors()[key], tensor), key
        again._held.close()


def test_free_settings_are_settings(config):
    assert all(hasattr(config, name) for name in FREE)


def test_golden_loss_curve(undisturbed, with_, start, corpus):
    """Twenty steps of tiny on a fixed text. A change of this curve is a change of the model, the data order or the
    optimizer: rewrite the file only when that was the aim."""
    golden = json.loads(GOLDEN.read_text())
    trainer = start("golden", with_(steps=20, seed=0))
    trainer.fit()
    losses = [r["loss"] for r in trainer.run.read_metrics("train")]
    assert losses == pytest.approx(golden["loss"], abs=golden["tolerance"])
    assert RunDir(trainer.run.path).read_metrics("train")[-1]["step"] == len(golden["loss"])
