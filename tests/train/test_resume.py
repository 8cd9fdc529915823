"""A run that was stopped anywhere and resumed is bit for bit the run that was not."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from perilune import checkpoint
from perilune.config import CheckpointConfig
from perilune.errors import CheckpointError, ConfigError
from perilune.rundir import RunDir
from perilune.train.callbacks import Callback
from perilune.train.trainer import finished


class StopAfter(Callback):
    """Ends a run as Ctrl-C would, after a given step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, record) -> None:
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def bits(run: RunDir, step: int) -> dict[str, bytes]:
    """Every tensor of a checkpoint: weights, biases, optimizer, generators."""
    found = {}
    for path in run.checkpoint_path(step).glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            found |= {name: file.get_tensor(name).tobytes() for name in file.keys()}
    return found


def timeless(run: RunDir) -> list[dict]:
    """Metrics without what depends on the clock."""
    clock = ("seconds", "tokens_per_second", "mfu")
    return [{k: v for k, v in record.items() if k not in clock} for record in run.read_metrics()]


@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_resume_from_any_step_is_bitwise_the_undisturbed_run(start, config, undisturbed, step):
    """Steps on both sides of the change of window length."""
    trainer = start("stopped", config, callbacks=[StopAfter(step)])
    summary = trainer.fit()
    assert (summary.stopped_by, summary.finished, summary.train["steps"]) == ("interrupt", False, step)
    again = start("stopped", None, resume=True)
    assert again.step == step
    end = again.fit()
    assert end.finished and end.train["tokens"] == 8 * 256
    assert bits(again.run, 8) == bits(undisturbed, 8)
    assert timeless(again.run) == timeless(undisturbed)
    assert end.routing == RunDir(undisturbed.path).read_json("summary.json")["routing"]


def test_resume_goes_back_over_a_damaged_checkpoint(start, config, undisturbed, caplog):
    every = replace(config, checkpoint=CheckpointConfig(every=2, keep=3))
    trainer = start("damaged", every, callbacks=[StopAfter(5)])
    trainer.fit()
    file = trainer.run.checkpoint_path(5) / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    again = start("damaged", None, resume=True)
    assert again.step == 4
    assert "step-00000005 is damaged" in caplog.text
    again.fit()
    assert bits(again.run, 8) == bits(undisturbed, 8)


def test_half_written_checkpoints_are_ignored_and_removed(start, config, undisturbed):
    trainer = start("killed", config, callbacks=[StopAfter(3)])
    trainer.fit()
    for name in (".step-00000004.77.tmp", ".step-00000001.77.old"):
        folder = trainer.run.checkpoints_path / name
        folder.mkdir()
        (folder / "model-00001-of-00001.safetensors").write_bytes(b"half")
    again = start("killed", None, resume=True)
    assert [p.name for p in again.run.checkpoints_path.iterdir()] == ["step-00000003"]
    again.fit()
    assert bits(again.run, 8) == bits(undisturbed, 8)


def test_t42_resume_takes_the_checkpoints_model_not_the_initial_one(start, config):
    trainer = start("t42", config, callbacks=[StopAfter(2)])
    trainer.fit()
    saved = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    again = start("t42", None, resume=True)
    assert all((again.model.state_dict()[k] == v).all() for k, v in saved.items())
    assert all((again.optimizer.muon.momentum[k] == v).all() for k, v in trainer.optimizer.muon.momentum.items())


def test_without_a_checkpoint_a_run_starts_over(start, config, undisturbed):
    trainer = start("early", config)
    trainer._held.close()  # the process died before its first checkpoint
    trainer.run.append_metrics({"kind": "train", "step": 1, "loss": 0.0})
    again = start("early", None, resume=True)
    assert again.step == 0
    again.fit()
    assert bits(again.run, 8) == bits(undisturbed, 8)
    assert timeless(again.run) == timeless(undisturbed)


def test_a_new_run_refuses_a_folder_that_holds_one(start, config, undisturbed):
    before = {p: p.read_bytes() for p in undisturbed.path.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=r"exists already; continue it with --resume, choose another --run"):
        start("undisturbed", config)
    assert {p: p.read_bytes() for p in undisturbed.path.rglob("*") if p.is_file()} == before


def test_resume_of_nothing_says_so(start, config):
    with pytest.raises(CheckpointError, match="no run in"):
        start("nothing", config, resume=True)
    assert not (Path(config.data.path[0]).parent / "nothing").exists()


def test_a_changed_configuration_is_refused_with_both_values(start, config, undisturbed):
    changed = replace(config, steps=16, optim=replace(config.optim, lr_muon=0.5))
    with pytest.raises(ConfigError, match=r"optim\.lr_muon: the run has 0\.02, now 0\.5; steps: the run has 8, now 16"):
        start("undisturbed", changed, resume=True)
    free = replace(config, checkpoint=CheckpointConfig(every=4), log_every=5, time_limit=100.0)
    start("undisturbed", free, resume=True)._held.close()


def test_another_vocabulary_is_refused(start, config, undisturbed, corpus):
    other = replace(config, data=replace(config.data, tokenizer="bpe"))
    donor = start("donor", other)
    donor._held.close()
    (undisturbed.tokenizer_path).write_bytes(donor.run.tokenizer_path.read_bytes())
    with pytest.raises(CheckpointError, match=r"vocabulary mismatch: .* another tokenizer \(288 ids"):
        start("undisturbed", None, resume=True)


def test_another_text_is_refused(start, with_, tmp_path, corpus):
    own = tmp_path / "text"
    own.mkdir()
    for path in corpus.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    config = with_(data=replace(with_().data, path=(str(own),)))
    start("run", config, callbacks=[StopAfter(2)]).fit()
    for path in own.iterdir():
        path.write_text(path.read_text() + "one more line of text\n")
    with pytest.raises(CheckpointError, match="the training text is not the one"):
        start("run", None, resume=True)


def test_finished_means_all_steps_or_no_time_left(start, config, undisturbed):
    assert finished(undisturbed, config)
    assert not finished(undisturbed, replace(config, steps=9))
    trainer = start("timed", replace(config, time_limit=1e-6))
    summary = trainer.fit()
    assert (summary.stopped_by, summary.train["steps"], summary.train["token_budget_reached"]) == (
        "time_limit",
        1,
        False,
    )
    assert summary.train["val_bits_per_byte"] is not None
    assert finished(trainer.run, trainer.config)
    more = replace(trainer.config, time_limit=0.0)
    assert not finished(trainer.run, more)
    start("timed", more, resume=True).fit()
    assert bits(trainer.run, 8) == bits(undisturbed, 8)


def test_two_trainers_on_one_run_are_refused(start, config):
    trainer = start("one", config)
    with pytest.raises(ConfigError, match="another process is writing"):
        start("one", None, resume=True)
    trainer._held.close()


def test_every_checkpoint_of_a_run_verifies(start, with_):
    trainer = start("all", with_(checkpoint=CheckpointConfig(every=1, keep=3)))
    trainer.fit()
    assert [step for step, _ in trainer.run.checkpoints()] == [6, 7, 8]
    assert all(checkpoint.problems(folder) == [] for _, folder in trainer.run.checkpoints())
