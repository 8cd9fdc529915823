"""`perilune doctor`: facts of the machine, and that no operation is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import perilune.ops
from perilune.cli import doctor
from perilune.cli.op_choices import op_choices, selects
from perilune.ops.choice import IMPLEMENTATIONS, force


@pytest.fixture(scope="module")
def facts():
    return doctor.examine()


def test_every_select_in_the_source_is_asked_and_answers(facts):
    folder = Path(perilune.ops.__file__).parent
    written = {path for path in folder.rglob("*.py") if "\ndef select(" in path.read_text()}
    assert len(written) == len(selects()) > 0
    for row in facts["ops"]:
        assert row["implementation"] in IMPLEMENTATIONS, row
        assert row["reason"].strip(), row
    assert {(row["device"], row["dtype"]) for row in facts["ops"]} >= {("cpu", "fp32"), ("cpu", "bf16")}


def test_ops_follow_what_is_forced():
    with force("torch"):
        assert {row["implementation"] for row in op_choices()} == {"torch"}


def test_switched_off_kernels_are_reported_with_the_reason():
    code = "import json; from perilune.cli.doctor import examine; print(json.dumps(examine()))"
    environment = os.environ | {"PERILUNE_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    told = json.loads(done.stdout)
    assert all("PERILUNE_NATIVE=0" in kernel["reason"] for kernel in told["native"]["kernels"].values())
    assert {row["implementation"] for row in told["ops"]} == {"torch"}
    # Projections have a kernel for a few rows without gradients only, and the sample has gradients; the others have none.
    others = (
        "linear", "packed_attention", "packed_conv", "kda.cuda.prepare", "mla.append", "mla.decode", "mla.keys", "mla.packed",
        "moe.router_latent", "mx.experts", "sigmoid_gate", "top_p",
    )  # fmt: skip
    switched = [r for r in told["ops"] if r["dtype"] == "fp32" and r["op"] not in others]
    assert switched and all("PERILUNE_NATIVE=0" in row["reason"] for row in switched)
    assert any("PERILUNE_NATIVE" in sentence for sentence in told["advice"])


def test_facts_are_those_of_this_machine(facts):
    assert facts["environment"]["torch"] == torch.__version__
    assert 1 <= facts["cpu"]["usable_cores"] <= facts["cpu"]["logical_cores"] == os.cpu_count()
    assert 0 < facts["memory"]["total_bytes"]
    assert 0 < facts["disk"]["free_bytes"]
    assert facts["devices"][0]["device"] == "cpu"
    assert len(facts["devices"]) - 1 >= torch.cuda.device_count()
    assert set(facts["native"]["kernels"]) == {
        path.stem for path in (Path(perilune.ops.__file__).parent / "native").glob("*.c")
    }


def test_missing_extras_say_how_to_install_them(facts, monkeypatch):
    real = doctor.metadata.version

    def version(name):
        if name == "starlette":
            raise doctor.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    told = doctor.examine()
    assert told["extras"]["serve"]["missing"] == ["starlette"]
    assert any("pip install 'perilune[serve]'" in sentence for sentence in told["advice"])


def test_json_is_one_object_and_text_shows_the_same(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.run(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"environment", "cpu", "memory", "disk", "devices", "extras", "native", "ops", "advice"} <= set(told)
    assert doctor.run(["--ops"]) == 0
    shown = capsys.readouterr().out
    for row in told["ops"]:
        assert row["op"] in shown
    assert torch.__version__ in shown
