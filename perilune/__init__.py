"""perilune: the Kimi K3 system as one Python package.

`perilune.load("runs/demo")` gives a model, its tokenizer and its config; `perilune.LLM("runs/demo")` answers prompts and
conversations in batches; `perilune.Model`, `perilune.Trainer` and `perilune.presets` are what scripts start from. They are imported when first used, so `import perilune` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": ("perilune.serve.llm", "LLM"),
    "Model": ("perilune.model", "Transformer"),
    "Trainer": ("perilune.train.trainer", "Trainer"),
    "load": ("perilune.loading", "load_run"),
    "presets": ("perilune.config.presets", None),
}
__all__ = ["__version__", *_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'perilune' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}")
    module, attribute = _PUBLIC[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)
