"""A small corpus, and tiny runs on it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.config import CheckpointConfig, DataConfig, EvalConfig, StageConfig, TrainConfig
from perilune.config.presets import tiny
from perilune.rundir import RunDir
from perilune.train.trainer import Trainer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten files of made-up statements, about 30 KB."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    names = ["alpha", "beta", "gamma", "delta", "count", "total", "index", "value"]
    for number in range(10):
        lines = [
            f"{draw.choice(names)}_{draw.randrange(40)} = {draw.choice(names)} + {draw.randrange(1000)}"
            for _ in range(draw.randrange(40, 160))
        ]
        (folder / f"part{number}.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@contextmanager
def _quick(cache: Path) -> Iterator[None]:
    """Prepared corpora of the tests stay out of the user's cache, and the matrix-product peak is not measured.

    Not for a whole session: tests of other folders that run in the same worker would get it, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perilune.train.run_data.cache_directory", lambda: cache)
        patch.setattr("perilune.train.trainer.measure_matmul_peak", lambda *a, **k: 1e9)
        yield


@pytest.fixture(scope="session")
def config(corpus: Path) -> TrainConfig:
    """Eight steps of two micro-batches, through two stages of window length."""
    return TrainConfig(
        model=tiny(),
        data=DataConfig(path=(str(corpus),), tokenizer="byte", holdout=0.2),
        stages=(StageConfig(seq_len=32, fraction=0.5), StageConfig(seq_len=64, fraction=0.5)),
        steps=8,
        tokens_per_step=256,
        microbatch_tokens=128,
        checkpoint=CheckpointConfig(every=0, keep=2),
        eval=EvalConfig(final_tokens=300),
        precision="fp32",
        device="cpu",
        threads=1,
        seed=3,
    )


@pytest.fixture
def start(tmp_path: Path, cache: Path):
    """`start(name, config, resume=…, callbacks=…)`: a trainer on the run folder `name`."""

    def make(name: str, config: TrainConfig | None, **options) -> Trainer:
        return Trainer.from_config(config, RunDir(tmp_path / name), **options)

    with _quick(cache):
        yield make


@pytest.fixture(scope="session")
def _undisturbed(tmp_path_factory: pytest.TempPathFactory, config: TrainConfig, cache: Path) -> Path:
    run = RunDir(tmp_path_factory.mktemp("runs") / "undisturbed")
    with _quick(cache):
        Trainer.from_config(config, run).fit()
    return run.path


@pytest.fixture
def undisturbed(_undisturbed: Path, tmp_path: Path) -> RunDir:
    """A finished run of `config`, under the name "undisturbed"; a copy of one made once."""
    shutil.copytree(_undisturbed, tmp_path / "undisturbed")
    return RunDir(tmp_path / "undisturbed")


@pytest.fixture
def with_(config: TrainConfig):
    """`with_(steps=3, …)`: the base configuration with some settings changed."""
    return lambda **changes: replace(config, **changes)
