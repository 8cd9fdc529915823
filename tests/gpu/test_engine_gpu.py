"""The serving engine on a GPU: its log-probabilities are the trainer's, and neither caches nor tiers change them."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from perilune.config.presets import nano
from perilune.model import Transformer, init_weights
from perilune.model.cast import compute_in
from perilune.serve.answer import Answer
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import SamplingParams
from perilune.serve.settings import EngineSettings
from perilune.tokenizer import ByteTokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENIZER = ByteTokenizer()
DRAWN = SamplingParams(seed=0, max_tokens=48, logprobs=0, ignore_eos=True)


def engine(context_length: int = 8192, **settings) -> LocalEngine:
    """Of `nano`: four layers with random weights answer bfloat16's rounding with 1.5 times its size; nine layers, as in
    `small`, with 190 times, since routes among random experts flip (float64, embedding disturbed by 1e-3)."""
    model = init_weights(Transformer(dataclasses.replace(nano(), vocab_size=TOKENIZER.vocab_size)), 0).cuda().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0 / model.lm_head.weight.std() / model.cfg.hidden_size**0.5)
    compute_in(model, torch.bfloat16)
    settings = {"cache_bytes": 2**29} | settings
    return LocalEngine(
        model, TOKENIZER, name="nano", context_length=context_length, settings=EngineSettings(**settings)
    )  # fmt: skip


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@pytest.fixture(autouse=True)
def scores(monkeypatch) -> list[float]:
    """Log-probabilities of all tokens as they are drawn; a stream leaves out those that show no text."""
    found: list[float] = []
    take = Answer.take
    monkeypatch.setattr(Answer, "take", lambda self, drawn: found.append(drawn.logprob.logprob) or take(self, drawn))
    return found


def served(engine: LocalEngine, ids: list[int], scores: list[float], params=DRAWN):
    """(ids of prompt and answer, log-probabilities of the answer, tokens that were skipped)."""
    scores.clear()
    job = engine.complete([ids], params)
    list(job)
    assert len(scores) == len(job.answers[0].token_ids)
    return ids + job.answers[0].token_ids, list(scores), job.usage.cached_tokens


def of_the_trainer(engine: LocalEngine, ids: list[int], count: int) -> torch.Tensor:
    """Log-probabilities of the last tokens by the path of the loss."""
    whole = torch.tensor([ids], device="cuda")
    with torch.no_grad():
        nats = engine.core.runner.model.token_nats(whole[:, :-1], whole[:, 1:])
    return -nats[0, -count:].double().cpu()


def test_trainer_and_server_agree(scores):
    """Chunks, pages, checkpoints and decode graphs against one pass, in bf16: within its own rounding."""
    running = engine(chunk=512)
    differences = []
    for seed, length in enumerate((5, 64, 600, 1500)):
        for _ in range(2):  # the second time from the cache
            ids, given, cached = served(running, text(seed, length), scores)
            trained = of_the_trainer(running, ids, len(given))
            differences.append((torch.tensor(given, dtype=torch.float64) - trained).abs())
            print(
                f"{length} tokens, {cached} cached: mean {differences[-1].mean():.2e}, max {differences[-1].max():.2e}"
            )
    assert cached > 1000
    worst = torch.cat(differences)
    # An estimate of the divergence by the difference of log-probabilities of drawn tokens: KL <= E|d|, and about E d²/2.
    print(f"mean {worst.mean():.2e}, half the mean square {0.5 * worst.square().mean():.2e}")
    assert float(0.5 * worst.square().mean()) < 1e-3 and running.admin.check_invariants() == []


def test_tiers_give_back_what_was_evicted(scores):
    running = engine(context_length=1024, cache_bytes=0, host_bytes=2**30)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    first = [served(running, text(seed, 900), scores, greedy) for seed in range(5)]
    again = [served(running, text(seed, 900), scores, greedy) for seed in range(5)]
    print(running.metrics().tiers)
    assert running.metrics().tiers["host_hits_total"] > 0 and all(cached > 0 for _, _, cached in again)
    for (_, cold, _), (_, warm, _) in zip(first, again):
        assert abs(cold[0] - warm[0]) < 0.1
