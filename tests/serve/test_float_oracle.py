"""The engine against the bare model: whatever is cached, cut, evicted, stopped or mixed, the scores are those of one pass."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from tiny_model import tiny_model

from perilune.config.presets import k2_nano, preset
from perilune.model import Transformer, init_weights
from perilune.serve.cache import HybridCache, Retention, RootKey, TokenChain
from perilune.serve.overlap import why_settled_first
from perilune.serve.runner import ModelRunner, PagePool, pool_geometry
from perilune.serve.schedule import Limits, Scheduler, Sequence, ServiceClass

ALL = (ServiceClass(name="all", up_to=2**62),)


class Served:
    """Scheduler, cache and runner without a thread; greedy, with every score compared to the bare model's.

    With `ahead` it plans and runs the next step before it looks at what the last one has drawn.
    """

    def __init__(
        self, model, *, unit=4, pages=400, retention="turns+second-hit", deterministic=False, ahead=False, **limits
    ):
        self.model, dtype = model, model.compute_dtype
        self.geometry = pool_geometry(model.cfg, dtype, unit=unit)
        self.cache = HybridCache(self.geometry, pages, Retention.parse(retention))
        pool = PagePool(model.cfg, self.geometry, pages, dtype, model.device)
        pool.bytes_PR.fill_(255)  # NaN in every format: what is read must have been written
        self.runner = ModelRunner(model, pool, model.cfg.vocab_size, deterministic=deterministic)
        limits = {"classes": ALL, "grid": unit if deterministic else 0} | limits
        self.scheduler = Scheduler(self.cache, Limits(**limits), ahead=ahead)
        self.under_way = deque()
        self.awaited = self.wasted = 0
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.count = 0

    def add(self, ids, tokens=6, turn_ends=(), **options) -> Sequence:
        self.count += 1
        chain = TokenChain(RootKey(model="m"), self.geometry.unit, ids)
        sequence = Sequence(f"q{self.count}", ids, chain, turn_ends=turn_ends, content=None, **options)
        self.logits[sequence.name] = []
        self.wanted = getattr(self, "wanted", {}) | {sequence.name: tokens}
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        """Plan and run a step, and settle those before it."""
        plan, on = self.scheduler.plan(), False
        if plan is not None:
            scores = self.runner.run(plan)
            if scores.rows:
                self.runner.keep(scores.rows, scores.together().argmax(-1))
            self.under_way.append((plan, scores))
            on = self.scheduler.ahead and why_settled_first(plan, self.scheduler) is None
        progress = bool(self.under_way)
        while len(self.under_way) > on:
            self.settle(*self.under_way.popleft())
        return progress

    def settle(self, plan, scores) -> None:
        drawn = {}
        for row in plan.rows:
            self.awaited += row.awaits
            self.wasted += row.sequence.state == "ended"
            if row.draws:
                name = row.sequence.name
                drawn[name] = int(scores.logits[name].argmax())
                if row.sequence.state == "running":
                    del self.logits[name][row.sequence.drawn :]
                    self.logits[name].append(scores.logits[name])
        self.scheduler.finish(plan, drawn)
        for row in plan.rows:
            if row.sequence.state == "running" and row.sequence.drawn >= self.wanted[row.sequence.name]:
                self.scheduler.end(row.sequence)

    def serve(self, *sequences) -> None:
        while not self.scheduler.idle:
            assert self.step(), "nothing goes on"
        self.cache.check_invariants()

    def error(self, sequence) -> float:
        """Largest difference to the scores of one pass over the whole text; the tokens must be the most likely ones."""
        with torch.no_grad():
            logits = self.model(torch.tensor([sequence.ids])).logits_BTZ[0, sequence.prompt - 1 : -1]
        assert sequence.ids[sequence.prompt :] == logits.argmax(-1).tolist()
        return float((torch.stack(self.logits[sequence.name]) - logits).abs().max())


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@pytest.fixture(scope="module", params=["fp64", "fp32"])
def kind(request):
    """(model, most that a score may be off)."""
    if request.param == "fp64":
        return tiny_model(), 1e-9
    return tiny_model(dtype=torch.float32, sharpness=1.0), 1e-4


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 63, 64, 65, 512])
def test_t27_every_chunk_size_gives_the_scores_of_one_pass(kind, chunk):
    model, most = kind
    served = Served(model, chunk=chunk, step_tokens=600)
    page = served.geometry.page_tokens
    lengths = [3, 4, 5, page - 1, page, page + 1, 63, 64, 65] if chunk > 1 else [5, page + 1]
    for _ in range(2):  # the second time from the cache
        sequences = [served.add(text(length, seed=length), tokens=3) for length in lengths]
        served.serve()
        assert max(map(served.error, sequences)) < most
    assert [s.resume for s in sequences] == [(length - 1) // 4 * 4 for length in lengths]


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_batches_orders_and_shared_beginnings(kind, batch):
    model, most = kind
    base, served = text(70), Served(model, step_tokens=24, chunk=9)
    order = random.Random(batch)
    prompts = [
        base[:n] + text(m, seed=n) for n, m in [(0, 9), (31, 0), (32, 5), (33, 1), (64, 6), (70, 0), (65, 2), (32, 5)]
    ]
    order.shuffle(prompts)
    sequences = []
    while prompts:
        group, prompts = prompts[:batch], prompts[batch:]
        sequences += [served.add(prompt, turn_ends=[len(prompt) // 2]) for prompt in group]
        for _ in range(order.randrange(5)):
            served.step()
    served.serve()
    assert max(map(served.error, sequences)) < most
    assert sum(s.resume for s in sequences) > 0


def test_a_b_a_and_evictions_between_turns(kind):
    """A small pool: what is evicted is computed again, what others wrote into its pages is never seen."""
    model, most = kind
    served = Served(model, pages=30)
    resumes = []
    for seed in (0, 1, 0, 2, 0, 3, 4, 5, 0, 1):
        sequence = served.add(text(60, seed=seed))
        served.serve()
        assert served.error(sequence) < most
        resumes.append(sequence.resume)
    assert resumes[2] > 0 and 0 in resumes[4:]
    assert served.cache.metrics().counters.pages_evicted > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_for_tokens_that_are_being_drawn(kind, deterministic):
    """Planned and run before anybody has looked at them, with rows wasted on answers that had ended: all scores are those of
    one pass, and what is cached afterwards serves others."""
    model, most = kind
    served = Served(model, step_tokens=40, chunk=16, deterministic=deterministic, ahead=True)
    lengths = (9, 30, 4, 17, 64, 5, 12, 33, 21)  # with a grid, in two groups of rows
    sequences = []
    for _ in range(2):
        for number, length in enumerate(lengths):
            longest = length + 9 - number % 4 if number % 2 else None
            sequences.append(served.add(text(length, seed=number), tokens=9 - number % 4, longest=longest))
            if number % 4 == 0:
                served.step()
        served.serve()
    assert max(map(served.error, sequences)) < most
    assert [len(s.ids) - s.prompt for s in sequences] == [9 - number % 4 for number in range(len(lengths))] * 2
    assert served.awaited > 20 and 0 < served.wasted <= len(lengths) + 1, "one row for those whose end nobody foresaw"
    assert sum(s.resume for s in sequences) > 100
    pool = served.cache.store.pool
    assert pool.free + pool.evictable == pool.pages


@pytest.mark.parametrize("ahead", [False, True])
def test_preemption_loses_nothing(kind, ahead):
    """More answers than pages: some start again, from what of them is cached, and end with the same text."""
    model, most = kind
    served = Served(model, pages=30, step_tokens=64, ahead=ahead)
    sequences = [served.add(text(22, seed=n), tokens=70) for n in range(4)]
    served.serve()
    assert max(map(served.error, sequences)) < most
    assert served.scheduler.preempted > 0 and sum(s.preemptions for s in sequences) == served.scheduler.preempted
    assert served.runner.tokens_run < 2 * sum(len(s.ids) for s in sequences)


def test_t11_stopped_in_the_middle_and_asked_again(kind):
    model, most = kind
    served = Served(model, step_tokens=16, chunk=16)
    for after in range(5):
        stopped = served.add(text(60, seed=9))
        plan = None
        for _ in range(after):
            served.step()
        plan = served.scheduler.plan()  # planned, and never run
        served.scheduler.end(stopped)
        served.scheduler.fail(plan)
        again = served.add(text(60, seed=9))
        served.serve()
        assert served.error(again) < most
        served.cache.reset()


def test_a_failed_step_leaves_no_trace(kind):
    model, most = kind
    served = Served(model, step_tokens=16, chunk=16)
    first = served.add(text(40))
    served.step()
    plan = served.scheduler.plan()
    served.runner.run(plan)
    served.runner.pool.bytes_PR[list(plan.rows[0].chunk.state)] = 255
    assert served.scheduler.fail(plan) == [first]
    second = served.add(text(40))
    served.serve()
    assert served.error(second) < most and second.resume == 16


def test_choices_follow_their_prompt(kind):
    model, most = kind
    served = Served(model, step_tokens=16, chunk=16)
    leader = served.add(text(50))
    followers = []
    for _ in range(3):
        follower = Sequence(f"f{len(followers)}", leader.ids, leader.chain.copy())
        served.logits[follower.name], served.wanted[follower.name] = [], 6
        leader.followers.append(follower)
        followers.append(follower)
    served.serve()
    assert [f.resume for f in followers] == [48] * 3 and leader.resume == 0
    assert max(map(served.error, [leader, *followers])) < most


def test_replies_serve_the_next_turn(kind):
    model, most = kind
    served = Served(model)
    first = served.add(text(30), tokens=21)
    served.serve()
    second = served.add([*first.ids, *text(7, seed=1)])
    served.serve()
    assert served.error(second) < most and second.resume == 48  # 30 + 20 that were run, in whole units


@pytest.mark.parametrize("retention", ["dense", "tail", "turns", "second-hit", "interval:12"])
def test_t28_states_written_inside_a_chunk_are_exact(kind, retention):
    """Every checkpoint, wherever a policy puts it, is what a pass that ends there leaves behind."""
    model, most = kind
    served = Served(model, retention=retention)
    base = text(63)
    served.add(base, turn_ends=[13, 30])
    served.serve()
    for length in (13, 25, 30, 41, 63):
        sequence = served.add(base[:length] + text(3, seed=length))
        served.serve()
        assert served.error(sequence) < most


@pytest.mark.parametrize(
    "name", ["k2_nano", "gdn", "softmax", "mla_softmax", "plain"]
)  # no states at all, one decay a head, plain keys and values, both kinds of caches, no depth stream
def test_other_mixers(name):
    changes = {
        "k2_nano": {"vocab_size": 256},
        "gdn": {"mixer": "gdn"},
        "softmax": {"global_mixer": "softmax"},
        "mla_softmax": {"mixer": "mla", "global_mixer": "softmax"},
        "plain": {"residual": "plain"},
    }[name]
    base = k2_nano() if name == "k2_nano" else preset("tiny")
    if "softmax" in name:
        from perilune.config import SoftmaxConfig

        changes["softmax"] = SoftmaxConfig(num_heads=2, head_dim=16)
    import dataclasses

    model = init_weights(Transformer(dataclasses.replace(base, **changes)), 0).double().eval()
    model.compute_dtype = torch.float64
    served = Served(model, chunk=20)
    for _ in range(2):
        sequences = [served.add(text(n, seed=n), tokens=4) for n in (5, 33, 64)]
        served.serve()
        assert max(map(served.error, sequences)) < 1e-9
    assert sum(s.resume for s in sequences) > 60


def test_deterministic_answers_are_bitwise_the_same_in_any_company():
    """fp32 on the CPU: alone, among others, from the cache, and after others."""
    model = tiny_model(dtype=torch.float32)
    prompts = [text(n, seed=n) for n in (5, 16, 17, 40, 64, 33)]

    def scores(served, chosen):
        sequences = [served.add(prompts[index], tokens=5, extends_chain=False) for index in chosen]
        served.serve()
        return {index: torch.stack(served.logits[s.name]) for index, s in zip(chosen, sequences)}

    def fresh(**limits):
        return Served(model, unit=16, deterministic=True, step_tokens=48, **limits)

    alone = {index: scores(fresh(), [index])[index] for index in range(len(prompts))}
    crowd = fresh()
    runs = [scores(crowd, order) for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [4, 0, 2, 5])]
    runs.append(scores(fresh(sequences=2), [3, 4, 0, 1, 5, 2]))
    many = fresh()
    for filler in range(14):  # more than one group of eight decodes
        many.add(text(20, seed=100 + filler), tokens=12, extends_chain=False)
    runs.append(scores(many, [0, 3, 5]))
    assert crowd.cache.metrics().counters.tokens_hit > 0
    for run in runs:
        for index, logits in run.items():
            assert torch.equal(logits, alone[index]), f"prompt {index}"


def test_trainer_and_server_agree_on_log_probabilities(kind):
    model, _ = kind
    wide = model.compute_dtype is torch.float64
    served = Served(model, chunk=17)
    sequences = [served.add(text(n, seed=n), tokens=20) for n in (9, 40, 70)]
    served.serve()
    differences = []
    for sequence in sequences:
        ids = torch.tensor([sequence.ids])
        targets = ids[:, 1:].clone()
        targets[:, : sequence.prompt - 1] = -100
        logits = torch.stack(served.logits[sequence.name])
        drawn = torch.tensor(sequence.ids[sequence.prompt :])
        ours = logits.log_softmax(-1).gather(-1, drawn[:, None])[:, 0]
        nats = model.loss(ids[:, :-1], targets).nats.detach()
        each = model.token_nats(ids[:, :-1], targets)[0, sequence.prompt - 1 :].detach()
        assert abs(float(nats + ours.sum())) < (1e-8 if wide else 1e-3)
        differences.append((each + ours).abs())
    worst = torch.cat(differences)
    assert float(worst.max()) < (1e-9 if wide else 1e-4) and float(worst.mean()) < (1e-9 if wide else 5e-6)
