"""Serving on a GPU: decoding by CUDA graphs equals decoding without, alone and in company, and cached prompts change nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from perilune.config.presets import nano
from perilune.model import Transformer, init_weights
from perilune.model.cast import compute_in
from perilune.ops.kda import chunk_kda, chunk_kda_states
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import SamplingParams
from perilune.serve.runner.graphs import DecodeGraphs
from perilune.serve.settings import EngineSettings
from perilune.tokenizer import ByteTokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 40


def engine() -> LocalEngine:
    tokenizer = ByteTokenizer()
    model = init_weights(Transformer(dataclasses.replace(nano(), vocab_size=tokenizer.vocab_size)), 0).cuda().eval()
    with torch.no_grad():  # far apart, so that rounding decides nothing
        model.lm_head.weight.mul_(8.0 / model.lm_head.weight.std() / model.cfg.hidden_size**0.5)
        model.lm_head.weight[256:] = 0
    compute_in(model, torch.bfloat16)
    settings = EngineSettings(cache_bytes=2**28, classes=())  # pieces of prompts do not depend on how fast a step was
    return LocalEngine(model, tokenizer, name="nano", settings=settings)


def answers(engine: LocalEngine, prompts: list[list[int]]) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in prompts]
    job = engine.complete(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    for delta in job:
        ids[delta.row].extend(delta.token_ids)
    return ids


def test_graphs_change_no_token_and_company_none(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 70, 300, 801)]
    recorded = engine()
    assert DecodeGraphs.why_not(recorded.core.runner.model, recorded.core.runner.pool) is None
    alone = [answers(recorded, [prompt])[0] for prompt in prompts]
    again = [answers(recorded, [prompt])[0] for prompt in prompts]  # behind cached prompts
    together = answers(recorded, prompts)
    recorded.close()
    with monkeypatch.context() as patch:
        patch.setattr(DecodeGraphs, "why_not", staticmethod(lambda model, pool: "switched off"))
        plain = engine()
    eager = [answers(plain, [prompt])[0] for prompt in prompts]
    plain.close()
    assert all(len(ids) == TOKENS for ids in alone)
    assert alone == eager, "the same kernels on the same numbers"
    assert [ids[:8] for ids in again] == [ids[:8] for ids in alone]
    assert [ids[:8] for ids in together] == [ids[:8] for ids in alone]


def test_rounded_matrices_give_the_numbers_of_rounding_on_the_way() -> None:
    torch.manual_seed(0)
    model = init_weights(Transformer(nano()), 0).cuda().eval()
    ids = torch.randint(0, 4096, (2, 50), device="cuda")
    with torch.no_grad():
        model.compute_dtype = torch.bfloat16
        before = model(ids).logits_BTZ
        after = compute_in(model, torch.bfloat16)(ids).logits_BTZ
    assert torch.equal(before, after)


def test_states_inside_a_prompt_come_out_of_the_scan() -> None:
    """In segments and without, at the kernels' own boundaries: equal to the final states of the prompt's beginnings."""
    torch.manual_seed(0)
    heads, options = (
        2,
        {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
    )
    options |= {
        "lower_bound": -5.0,
        "safe_gate": True,
        "A_log": torch.zeros(heads, device="cuda"),
        "state_v_first": True,
    }
    for length in (1000, 9000):
        shapes = [(1, length, heads, 128)] * 4 + [(1, length, heads)]
        sequence = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
        marks = [64, 512, length // 64 * 64]
        o, final, states = chunk_kda_states(*sequence, marks, **options)
        truth, last = chunk_kda(*sequence, output_final_state=True, **options)
        assert torch.equal(o, truth) and torch.equal(final, last)
        for mark, state in zip(marks, states, strict=True):
            _, expected = chunk_kda(*(x[:, :mark] for x in sequence), output_final_state=True, **options)
            assert float((state - expected).norm() / expected.norm()) < 1e-2, mark
