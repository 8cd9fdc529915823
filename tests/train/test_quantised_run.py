"""A run whose routed experts are trained in MXFP4 and MXFP8, set in its configuration."""

from __future__ import annotations

import pytest
import torch

from perilune.config import CheckpointConfig, QuantConfig
from perilune.config.parse import parse_flags
from perilune.config.train import TrainConfig
from perilune.errors import ConfigError
from perilune.loading import load_run
from perilune.ops.mx import fake_quantize
from perilune.train.callbacks import Callback


class StopAt(Callback):
    """Ends the run after a step, as a time limit does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, record) -> None:
        if trainer.step == self.step:
            trainer.stop_reason = "time_limit"


def test_a_quantised_run_learns_and_resumes_bit_for_bit(start, with_):
    quant = QuantConfig(weights="mxfp4", activations="mxfp8", rule="even")
    config = with_(quant=quant, checkpoint=CheckpointConfig(every=3))
    whole = start("whole", config)
    summary = whole.fit()
    plain = start("plain", with_())
    plain.fit()
    assert summary.train["loss_last"] < summary.train["loss_first"] - 0.5
    first = [run.run.read_metrics("train")[0]["loss"] for run in (whole, plain)]
    assert first[0] != first[1] and first[0] == pytest.approx(first[1], abs=0.02), (
        "rounding changes a little, from step 1"
    )

    start("cut", config, callbacks=[StopAt(5)]).fit()
    resumed = start("cut", None, resume=True)
    assert resumed.config.quant == quant and resumed.step == 5
    resumed.fit()
    for (name, ours), theirs in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    loaded = load_run(whole.run.path).model
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits_BTZ, whole.model.eval()(ids).logits_BTZ), "served as it was trained"
    weight = whole.model.moe_layers()[0].experts.w1.detach()
    assert not torch.equal(fake_quantize(weight, "mxfp4", "even"), weight), "masters keep their precision"
    with pytest.raises(ConfigError, match="quant.weights: the run has 'mxfp4', now 'none'"):
        start("cut", with_(), resume=True)


def test_flags_reach_the_setting(config):
    found = parse_flags(TrainConfig, ["--quant.weights", "mxfp4", "--quant.rule", "ceil"], config, prog="train")
    assert found.quant == QuantConfig(weights="mxfp4", rule="ceil")
    with pytest.raises(ConfigError, match="quant.activations='fp8' is not known; allowed: none, mxfp8"):
        parse_flags(TrainConfig, ["--quant.activations", "fp8"], config, prog="train")
