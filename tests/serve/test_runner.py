"""How the runner computes: decode passes recorded and repeated, prompts that arrive together in one pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_float_oracle import Served, text
from tiny_model import tiny_model

from perilune.bench.kimi_linear import kimi_linear_shaped
from perilune.config.presets import k2_nano, tiny
from perilune.model import Transformer, init_weights
from perilune.ops.native import build
from perilune.serve.runner.recordings import DecodeRecordings

needs_c = pytest.mark.skipif(build.unavailable_reason("linear") is not None, reason="no C compiler")


def fp32(**parts) -> Transformer:
    return tiny_model(dtype=torch.float32, sharpness=1.0, **parts)


def kimi() -> Transformer:
    """Kimi-Linear's kinds of layers, and rows that more than eight share go through other kernels."""
    return init_weights(Transformer(kimi_linear_shaped(dataclasses.replace(tiny(), vocab_size=288))), 1).eval()


def answers(model, count: int, recorded: bool, **options) -> tuple[Served, list]:
    served = Served(model, step_tokens=600, **options)
    if not recorded:
        served.runner.decode_recordings = None
    sequences = [served.add(text(9 + seed, seed=seed), tokens=3 + seed % 9) for seed in range(count)]
    served.serve()
    return served, sequences


@needs_c
@pytest.mark.parametrize(("make", "count"), [(fp32, 3), (fp32, 12), (kimi, 10)])
def test_recorded_passes_give_the_same_bits(make, count):
    """Rows leave one after the other, so that there are recordings of several sizes, each used for several steps."""
    model = make()
    ours, sequences = answers(model, count, recorded=True)
    plain, wanted = answers(model, count, recorded=False)
    assert isinstance(ours.runner.decode_recordings, DecodeRecordings) and plain.runner.decode_recordings is None
    assert [s.ids for s in sequences] == [s.ids for s in wanted]
    for ours_logits, plain_logits in zip(ours.logits.values(), plain.logits.values(), strict=True):
        assert torch.equal(torch.stack(ours_logits), torch.stack(plain_logits))


@needs_c
def test_a_recorded_step_runs_no_module():
    model = fp32()
    served = Served(model)
    sequence = served.add(text(9), tokens=8)
    calls = []
    model.norm.register_forward_hook(lambda *_: calls.append(1))
    served.serve()
    assert served.error(sequence) < 1e-4
    assert len(calls) == 1 + 2 + 1, (
        "the prompt, the first pass, the recorded one, and the check; all others are repeats"
    )


@needs_c
def test_recordings_are_given_up_when_they_are_too_large(monkeypatch):
    monkeypatch.setattr("perilune.serve.runner.recordings.MOST_BYTES", 1)
    model = fp32()
    ours, sequences = answers(model, 4, recorded=True)
    assert max(map(ours.error, sequences)) < 1e-4
    kept = [one for one in ours.runner.decode_recordings._recorded.values() if one is not None]
    assert len(kept) == 1


def test_what_is_not_recorded_says_why():
    served = Served(tiny_model())
    assert served.runner.decode_recordings is None
    assert "float64" in DecodeRecordings.why_not(served.model, served.runner.pool)
    others = Transformer(dataclasses.replace(tiny(), mixer="gdn")).eval()
    assert "gdn" in DecodeRecordings.why_not(others, served.runner.pool)


@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_that_arrive_together_run_together(deterministic):
    """In one pass, whatever their lengths and hits; alone where company must not change a bit."""
    model, passes = tiny_model(), []
    served = Served(model, step_tokens=600, deterministic=deterministic)
    first = served.add(text(30), turn_ends=[16])
    served.serve()
    model.embed.register_forward_hook(lambda _module, ids, _out: passes.append(ids[0].shape))
    prompts = [text(30) + [7], text(5, seed=1), text(30)[:17] + [1, 2], [3]]
    sequences = [served.add(prompt, tokens=1) for prompt in prompts]
    served.step()
    if not deterministic:
        assert len(passes) == 1 and passes[0][1] == sum(len(p) - s.resume for p, s in zip(prompts, sequences))
    served.serve()
    assert [s.resume > 0 for s in sequences] == [True, False, True, False]
    assert max(map(served.error, [first, *sequences])) < 1e-9


def test_positions_keep_prompts_apart():
    """Layers that rotate by position take one sequence a pass."""
    model = init_weights(Transformer(k2_nano()), 3).double().eval()
    model.compute_dtype = torch.float64
    served = Served(model, unit=64, pages=60, step_tokens=600)
    sequences = [served.add(text(n, seed=n), tokens=2) for n in (20, 33)]
    served.serve()
    assert max(map(served.error, sequences)) < 1e-9
