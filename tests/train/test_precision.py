"""What the settings auto, fp32 and bf16 mean here, and the utilisation number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perilune.config.presets import training
from perilune.errors import ConfigError
from perilune.shapes.flops import train_flops_per_token
from perilune.train import precision
from perilune.train.mfu import measure_matmul_peak, mfu
from perilune.train.precision import resolve_device, resolve_precision, set_threads

CPU = torch.device("cpu")


def test_auto_says_why(monkeypatch):
    monkeypatch.setattr(precision, "cpu_bf16_feature", lambda: None)
    assert resolve_precision("auto", CPU) == (
        torch.float32,
        "this CPU has no bf16 instructions (avx512_bf16, amx_bf16)",
    )
    monkeypatch.setattr(precision, "cpu_bf16_feature", lambda: "amx_bf16")
    assert resolve_precision("auto", CPU) == (torch.bfloat16, "this CPU has amx_bf16")
    assert resolve_precision("auto", torch.device("cuda")).dtype == torch.bfloat16
    assert resolve_precision("fp32", torch.device("cuda")).dtype == torch.float32
    assert resolve_precision("bf16", CPU).dtype == torch.bfloat16


def test_a_missing_gpu_is_an_error_not_a_fallback(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        resolve_device("cuda")


def test_threads_as_asked_then_as_the_environment_says(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert set_threads(training("tiny")) == 1
        assert set_threads(replace(training("tiny"), threads=2)) == 2
    finally:
        torch.set_num_threads(before)


def test_mfu_is_flops_over_peak():
    model = training("tiny").model
    assert mfu(model, 64, 1000.0, 1e9) == pytest.approx(train_flops_per_token(model, 64) * 1000.0 / 1e9)
    assert measure_matmul_peak(CPU, torch.float32, budget=0.0) > 1e6


def test_bf16_trains_on_the_cpu(start, with_):
    trainer = start("bf16", with_(precision="bf16", steps=2))
    assert trainer.model.compute_dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    summary = trainer.fit()
    assert summary.finished and summary.train["val_bits_per_byte"] > 0
