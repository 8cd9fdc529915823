"""No less accurate than fla-core: on equal inputs, relative to float64, tensor by tensor, whatever the inputs are like.

The peer's autotuner takes its first candidate: which one runs decides its speed, and compiling them all takes minutes.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")
pytest.importorskip("fla.ops.kda", reason="fla-core is not installed")

from triton.runtime.autotuner import Autotuner

from perilune.bench import gpu_accuracy, gpu_kda

ALLOWED = 1.05
# Of few numbers two equally exact ways differ by chance: A_log's gradient is 64, in which both err by the rounding of states
# alone where nothing is forgotten.
LARGER = {"d_A_log": 1.5, "d_dt_bias": 1.5}


@pytest.fixture(autouse=True)
def _first_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    prune = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: prune(self, kwargs)[:1])


@pytest.mark.parametrize("gate", gpu_accuracy.GATES.values(), ids=lambda gate: gate.title)
def test_no_less_accurate_than_fla_core(gate: gpu_accuracy.Gate) -> None:
    """All kinds in one test, since the peer takes half a minute to compile."""
    peer, failed = gpu_kda.peer(), []
    assert peer is not None
    for kind in gpu_accuracy.KINDS:
        ours, theirs = gpu_accuracy.compared(kind, gate.settings, gpu_kda.ours, peer)
        found = " ".join(f"{n} {e:.1e} of {theirs[n]:.1e} ({e / theirs[n]:.2f})" for n, e in ours.items())
        print(f"{kind}: {found}", flush=True)
        failed += [f"{kind} {n}: {found}" for n, e in ours.items() if not e <= LARGER.get(n, ALLOWED) * theirs[n]]
    assert not failed, "\n".join(failed)
