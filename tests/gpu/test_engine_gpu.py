"""The serving engine on a GPU: its log-probabilities are the trainer's, and neither caches nor tiers change them."""

from __future__ import annotations

import dataclasses
import queue
import random

import pytest
import torch

from perilune.config.presets import nano
from perilune.model import Transformer, init_weights
from perilune.model.cast import compute_in
from perilune.ops.top_p import by_lists, top_p_cutoff
from perilune.serve.answer import Answer
from perilune.serve.engine import JobEnd
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import SamplingParams, Service
from perilune.serve.sampling import SamplingRow, start_draw
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


@pytest.fixture
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


# ---- the next step is planned while the device works

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
KINDS = (
    GREEDY,
    SamplingParams(seed=3, temperature=1.3, top_p=0.9, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=4, top_k=20, min_p=0.01, max_tokens=40, logprobs=3),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.3, max_tokens=40, min_tokens=40),
    SamplingParams(seed=5, presence_penalty=1.0, logit_bias=((65, 4.0), (66, -50.0)), max_tokens=40),
)


def finish(engine: LocalEngine, asked: list[tuple[list[int], SamplingParams]], salt: str = "") -> list[list[int]]:
    """Ids of all answers; the requests arrive together."""
    heard: queue.SimpleQueue = queue.SimpleQueue()
    jobs = [engine.complete([ids], params, service=Service(cache_salt=salt)) for ids, params in asked]
    engine.admin.pause()
    for job in jobs:
        job.start(lambda event: heard.put(event.error) if isinstance(event, JobEnd) else None)
    engine.admin.resume()
    assert [heard.get(timeout=60) for _ in jobs] == [None] * len(jobs)
    return [job.answers[0].token_ids for job in jobs]


def test_overlap_changes_no_token():
    """Alone, where stops end answers unforeseen, and in company of constant size."""
    synchronous, ahead = engine(overlap=False), engine()
    assert ahead.core.scheduler.ahead and not synchronous.core.scheduler.ahead
    for number, params in enumerate(KINDS):
        asked = [(text(number, 30 + 50 * number), params)]
        (expected,) = finish(synchronous, asked)
        assert finish(ahead, asked) == [expected]
        if params is GREEDY:
            for stop in (expected[7], expected[30]):
                stopped = [(asked[0][0], dataclasses.replace(params, stop_ids=(stop,)))]
                (answer,) = finish(ahead, stopped)
                assert finish(synchronous, stopped) == [answer] and stop not in answer[:-1]
    together = [(text(number, 40), dataclasses.replace(KINDS[number % 5], ignore_eos=True)) for number in range(10)]
    assert finish(ahead, together) == finish(synchronous, together)
    assert ahead.metrics().generated_tokens_total == synchronous.metrics().generated_tokens_total
    for one in (synchronous, ahead):
        assert one.admin.check_invariants() == [] and one.metrics().pages_used == 0
        one.close()


def test_stops_with_steps_in_flight():
    running, choose = engine(cache_bytes=2**25, context_length=512, sequences=6), random.Random(0)
    asked = [(text(seed, 64), GREEDY) for seed in range(4)]
    expected = finish(running, asked)
    heard: queue.SimpleQueue = queue.SimpleQueue()
    jobs = []
    for seed in range(60):
        job = running.complete([text(seed % 9, choose.randint(1, 200))], KINDS[seed % 5], choose.choice((1, 2)))
        patience = iter(range(choose.randint(1, 40)))

        def listen(event, job=job, patience=patience):
            if isinstance(event, JobEnd):
                heard.put(event.error)
            elif next(patience, None) is None:
                job.close()

        job.start(listen)
        jobs.append(job)
        if choose.random() < 0.4:
            choose.choice(jobs).close()
        if choose.random() < 0.1:
            assert running.admin.check_invariants() == []
    assert [heard.get(timeout=60) for _ in jobs] == [None] * len(jobs)
    assert running.admin.check_invariants() == [] and running.metrics().pages_used == 0
    assert finish(running, asked, "nothing of it is cached") == expected


def test_neither_a_draw_nor_a_step_waits_for_the_device():
    """In the mode in which torch refuses to wait."""
    rows = [SamplingRow(params, [1, 2, 3, 70], ends={256, 257}) for params in (*KINDS, *KINDS)]
    logits_BZ = torch.randn(len(rows), 5000, device="cuda")
    for _ in range(2):
        start_draw(rows, logits_BZ).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        draws = [start_draw(rows, logits_BZ) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(0 <= one.token_id < 5000 for draw in draws for one in draw.read())
    running, watched = engine(), []
    run = running.core.runner.run

    def strict(plan, stage):
        if plan.prefill or plan.decode[0].sequence.drawn < 6:  # passes are recorded
            return run(plan, stage)
        watched.append(plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(plan, stage)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    running.core.runner.run = strict
    finish(running, [(text(seed, 40), GREEDY) for seed in range(3)])
    assert len(watched) > 20


def test_a_nucleus_is_that_of_the_host():
    """The cut-off by the kernel equals that of a sort, and draws are those of the host."""
    torch.manual_seed(0)
    logits_BZ = torch.randn(6, 160_000)
    logits_BZ[::2] *= 6
    logits_BZ[3] = (logits_BZ[3] * 4).round() / 4  # ties
    there, scale_B1 = logits_BZ.cuda(), torch.tensor([[1.0], [0.5], [2.0], [1.0], [1.0], [0.7]], device="cuda")
    weights_BZ = torch.exp((there - there.amax(-1, keepdim=True)) * scale_B1)
    for share in (0.01, 0.5, 0.95, 0.9999):
        goal_B1 = share * weights_BZ.sum(-1, True, dtype=torch.float64)
        ours, sorted_B1 = top_p_cutoff(there, weights_BZ, goal_B1), by_lists(there, weights_BZ, goal_B1, ())
        assert torch.equal(ours, sorted_B1), (share, ours, sorted_B1)
    params = [SamplingParams(seed=row, top_p=p) for row, p in enumerate((0.5, 0.9, 0.95, 0.99, 0.3, 0.8))]
    drawn = []
    for logits in (logits_BZ, there):
        rows = [SamplingRow(one) for one in params]
        drawn.append([[one.token_id for one in start_draw(rows, logits).read()] for _ in range(20)])
    same = sum(a == b for ours, theirs in zip(*drawn) for a, b in zip(ours, theirs))
    assert same >= 118, f"{same} of 120 draws agree; exp and sums round differently"
