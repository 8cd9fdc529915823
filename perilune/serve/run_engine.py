"""From a run folder to an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from perilune.data.image_input import image_processor
from perilune.errors import CheckpointError, ConfigError
from perilune.loading import load_run
from perilune.loading.native import PUBLISHED
from perilune.model.cast import compute_in
from perilune.rundir import RunDir
from perilune.serve.images import ShownImages
from perilune.serve.local_engine import LocalEngine
from perilune.serve.settings import EngineSettings


def load_engine(
    run: str | Path,
    *,
    device: str = "auto",
    step: int | None = None,
    context_length: int = 8192,
    settings: EngineSettings | None = None,
) -> LocalEngine:
    """Load a run's newest checkpoint, or that of `step`, as an engine that bears the run's name.

    The run's `chat.json` says whether the model was taught to think; a run without a chat stage was not, and its
    generation prompt opens the response at once.

    Args:
        run: a name under `runs/`, or a folder.
        device: auto = CUDA if there is one, else CPU. On CUDA the model computes in bfloat16.
        context_length, settings: see `LocalEngine`.

    Raises:
        CheckpointError: no such run or checkpoint, or it is damaged.
        ConfigError: there is no such device, or the folder's documents are damaged.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    loaded = load_run(run, device, step)
    if device == "cuda":
        compute_in(loaded.model, torch.bfloat16)
    folder = RunDir.resolve(run)
    images = None
    if loaded.config.model.vision is not None:
        documents = folder.path / PUBLISHED if folder.exists() else folder.path
        images = ShownImages(loaded.model, image_processor(loaded.config, documents))
    return LocalEngine(
        loaded.model,
        loaded.tokenizer,
        name=folder.name,
        thinking=_thinking(folder),
        images=images,
        context_length=context_length,
        settings=settings,
    )


def _thinking(folder: RunDir) -> bool:
    if not (folder.path / "chat.json").exists():
        return False
    value = folder.read_json("chat.json")
    thinking = value.get("thinking") if isinstance(value, dict) else None
    if not isinstance(thinking, bool):
        raise CheckpointError(
            f'{folder.path / "chat.json"} must hold {{"thinking": true}} or false; it has {str(value)[:80]}'
        )
    return thinking
