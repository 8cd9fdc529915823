"""What `import perilune` offers, and that it costs nothing before it is used."""

import subprocess
import sys

import pytest

import perilune


def test_names_lead_to_the_real_things():
    from perilune.loading import load_run
    from perilune.model import Transformer
    from perilune.serve.llm import LLM
    from perilune.train.trainer import Trainer

    assert perilune.Model is Transformer and perilune.Trainer is Trainer and perilune.load is load_run
    assert perilune.LLM is LLM
    assert perilune.presets.nano().hidden_size == 128
    with pytest.raises(AttributeError, match="public names: LLM, Model"):
        _ = perilune.Modle


def test_importing_is_light():
    code = "import sys, perilune; print(perilune.__version__, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "0.1.0",
        "False",
    ]
