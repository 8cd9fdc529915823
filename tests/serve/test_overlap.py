"""Engines that plan and launch the next step before they look at what the last one has drawn: nobody can tell.

On a CPU they would not by themselves; the logic is the same.
"""

from __future__ import annotations

import functools
import queue
import random

import pytest
import torch
from tiny_model import TOKENIZER, scripted_engine, tiny_engine

from perilune.errors import CheckpointError
from perilune.serve.cache import TokenChain
from perilune.serve.core import EngineCore
from perilune.serve.engine import EngineFailed, JobEnd
from perilune.serve.request import SamplingParams, Structured
from perilune.serve.runner.inputs import DecodeInputs
from perilune.serve.schedule import Scheduler, ServiceClass
from perilune.serve.settings import EngineSettings

PROMPTS = [list(b"def f(x):\n"), list(b"a"), list(b"import os, sys\nprint("), list(b"while True:"), list(b"q" * 17)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def settings(overlap: bool = True, **others) -> EngineSettings:
    return EngineSettings(**{"unit": 4, "cache_bytes": 2**23, "overlap": overlap} | others)


def engine_of(overlap: bool = True, *, context_length: int = 8192, **others):
    return tiny_engine(settings=settings(overlap, **others), context_length=context_length)


@functools.cache
def synchronous(deterministic: bool = False):
    """An engine to compare with."""
    return engine_of(False, deterministic=deterministic)


@functools.cache
def requests() -> list[tuple[list[int], SamplingParams, int]]:
    """Answers that end in every way, and are drawn in every way; (prompt, params, choices)."""
    ((answer,),) = finish(synchronous(), [(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=20), 1)])
    text, ids, *_ = answer
    return [
        (PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, stop_ids=(ids[6],)), 1),
        (PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, stop=(text[4:6],), logprobs=2), 1),
        (PROMPTS[1], SamplingParams(seed=3, temperature=2.0, max_tokens=12, top_p=0.9, logprobs=0), 3),
        (PROMPTS[2], GREEDY, 2),
        (PROMPTS[3], SamplingParams(seed=5, temperature=1.5, max_tokens=14, frequency_penalty=1.5, top_k=9), 1),
        (PROMPTS[4], SamplingParams(temperature=0.0, max_tokens=11, repetition_penalty=1.9, min_tokens=4), 1),
        (PROMPTS[4], SamplingParams(seed=1, max_tokens=40, logit_bias=((ids[0], 9.0), (65, 9.0)), stop_ids=(65,)), 3),
        (PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=1), 1),
    ]


def finish(engine, asked) -> list[list[tuple]]:
    """All at once; of each answer (text, ids, reason, log-probabilities, tokens of the job)."""
    jobs = [engine.complete([prompt], params, n) for prompt, params, n in asked]
    heard: queue.SimpleQueue = queue.SimpleQueue()
    for number, job in enumerate(jobs):
        job.start(lambda event, number=number: heard.put((number, event)))
    deltas: list[list] = [[] for _ in jobs]
    ended = 0
    while ended < len(jobs):
        number, event = heard.get(timeout=60)
        if isinstance(event, JobEnd):
            assert event.error is None, event.error
            ended += 1
        else:
            deltas[number].append(event)
    return [
        [
            (
                "".join(d.text for d in said if d.row == row), answer.token_ids, answer.finish_reason,
                [
                    (one.token_id, [(token, round(value, 3)) for token, value in one.top])
                    for d in said if d.row == row for one in d.logprobs
                ],
                [i for d in said if d.row == row for i in d.token_ids], job.usage.completion_tokens,
            )
            for row, answer in enumerate(job.answers)
        ]
        for job, said in zip(jobs, deltas)
    ]  # fmt: skip


@pytest.fixture
def awaited(monkeypatch) -> list:
    """Rows that were planned for tokens nobody knew."""
    rows, plan = [], Scheduler.plan

    def watched(self):
        planned = plan(self)
        rows.extend(row for row in (planned.rows if planned else ()) if row.awaits)
        return planned

    monkeypatch.setattr(Scheduler, "plan", watched)
    return rows


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_are_those_of_the_synchronous_order(awaited, deterministic):
    asked = requests()
    expected = finish(synchronous(deterministic), asked)
    assert not awaited
    engine = engine_of(deterministic=deterministic)
    for _ in range(2):  # from the cache the second time, which holds nothing that was never said
        assert finish(engine, asked) == expected
    assert len(awaited) > 60
    counts, tokens = engine.metrics(), sum(len(ids) for job in expected for _, ids, *_ in job)
    assert counts.generated_tokens_total == 2 * tokens and counts.pages_used == 0
    assert 0 < counts.overlapped_steps_total < counts.steps_total
    assert synchronous(deterministic).metrics().overlapped_steps_total == 0
    assert engine.admin.check_invariants() == []
    for job in expected:
        for _, ids, _, _, told, completed in job:
            assert told == ids and completed == sum(len(other) for _, other, *_ in job)


def test_company_changes_no_answer():
    """Greedy and seeded ones, alone and among others."""
    asked, engine = requests(), engine_of()
    together = finish(engine, asked)
    for one, expected in zip(asked, together):
        assert finish(engine, [one]) == [expected]


def test_what_a_dropped_row_computes_is_no_hit(monkeypatch):
    """The row behind an answer's end completes a unit."""
    script = [*b"abcdefghij", TOKENIZER.special.eos]
    engine = scripted_engine(script, settings=settings())
    ran = []
    run = engine.core.runner.run
    monkeypatch.setattr(engine.core.runner, "run", lambda plan, stage: ran.extend(plan.rows) or run(plan, stage))
    ((answer,),) = finish(engine, [([65], SamplingParams(temperature=0.0, max_tokens=30), 1)])
    assert answer[1] == script and answer[2] == "stop"
    (sequence,) = {row.sequence for row in ran}
    assert max(row.chunk.end for row in ran) == len(sequence.ids) == 12, "one row behind the end was run"
    longer = TokenChain(engine.prefixes.root_key(), 4, [*sequence.ids, 0])
    assert engine.core.cache.match(longer).known == 8
    assert engine.metrics().generated_tokens_total == len(script)


def test_known_lengths_cost_no_row(awaited):
    engine = engine_of()
    finish(engine, [(prompt, SamplingParams(temperature=0.0, max_tokens=7), 1) for prompt in PROMPTS])
    assert engine.core.runner.tokens_run == sum(len(prompt) + 6 for prompt in PROMPTS) and awaited


def test_grammars_get_their_masks_between_pass_and_draw(awaited):
    """Rows with one are planned ahead like all others; their draws come when the tokens before them are known."""
    forms = [Structured("regex", "[ab]{3}c*d"), Structured("choice", ["abc", "xy"]), Structured("regex", "z+")]
    params = [SamplingParams(seed=2, temperature=1.5, max_tokens=13, structured=form) for form in forms]
    asked = [(prompt, one, 2) for prompt, one in zip(PROMPTS, params)] + [(PROMPTS[3], GREEDY, 1)]
    expected = finish(synchronous(), asked)
    assert {answer[2] for job in expected for answer in job} == {"stop", "length"}
    assert finish(engine_of(), asked) == expected
    assert sum(row.sequence.content.constraint is not None for row in awaited) > 10


def test_pieces_of_long_prompts_run_ahead_unless_short_ones_come(monkeypatch):
    """Who comes while a step with prompts is under way waits for that one only."""
    classes = (ServiceClass(name="short", up_to=16), ServiceClass(name="long", up_to=2**62, cap=0.9))
    engine = engine_of(chunk=16, step_tokens=16, classes=classes)
    run, behind = engine.core.runner.run, []

    def watched(plan, stage):
        behind.append(bool(engine.core._flights) and bool(plan.prefill))
        return run(plan, stage)

    monkeypatch.setattr(engine.core.runner, "run", watched)
    long, short = (list(range(200)), GREEDY, 1), ([1, 2, 3], GREEDY, 1)
    (alone,) = finish(engine, [long])
    assert sum(behind) == 12, "each of thirteen pieces but the first is launched behind another"
    engine.admin.reset_prefix_cache()
    behind.clear()
    assert finish(engine, [short, long])[1] == alone and not any(behind)


def test_stopping_with_steps_under_way_leaves_all_pages_behind():
    """Listeners that stop their jobs when they have heard enough, others at any time, in a pool that is too small."""
    engine = engine_of(cache_bytes=2**17, chunk=16, step_tokens=32, context_length=256)
    choose, heard = random.Random(0), queue.SimpleQueue()
    jobs = []
    for _ in range(40):
        prompt = choose.choice(PROMPTS) * choose.randint(1, 3)
        patience = iter(range(choose.randint(1, 30)))
        job = engine.complete([prompt], SamplingParams(seed=1, max_tokens=choose.randint(1, 30)), choose.choice((1, 3)))

        def listen(event, job=job, patience=patience):
            if isinstance(event, JobEnd):
                heard.put(event)
            elif next(patience, None) is None:
                job.close()

        job.start(listen)
        jobs.append(job)
        if choose.random() < 0.3:
            choose.choice(jobs).close()
        if choose.random() < 0.2:
            assert engine.admin.check_invariants() == []
    assert all(heard.get(timeout=60).error is None for _ in jobs)
    counts = engine.metrics()
    assert engine.admin.check_invariants() == [] and (counts.running, counts.waiting, counts.pages_used) == (0, 0, 0)
    assert counts.generated_tokens_total == sum(job.usage.completion_tokens for job in jobs)


def test_a_launch_that_fails_ends_its_own_step_only():
    """What the step before has drawn is told."""
    asked = [(prompt, SamplingParams(temperature=0.0, max_tokens=9), 1) for prompt in PROMPTS[:2]]
    expected = finish(synchronous(), asked)
    engine = engine_of()
    run, calls = engine.core.runner.run, []

    def faulty(plan, stage):
        calls.append(plan)
        if len(calls) == 5:
            raise RuntimeError("device lost")
        return run(plan, stage)

    engine.core.runner.run = faulty
    job = engine.complete([PROMPTS[0]], asked[0][1])
    with pytest.raises(EngineFailed, match="device lost"):
        list(job)
    assert job.answers[0].token_ids == expected[0][0][1][:4], "four steps were launched before, and all were told"
    assert engine.admin.check_invariants() == [] and finish(engine, asked) == expected


def test_scores_that_are_not_finite_are_noticed_with_a_step_behind_them():
    engine = engine_of()
    run = engine.core.runner.run

    def spoilt(plan, stage):
        scores = run(plan, stage)
        if plan.decode and plan.decode[0].sequence.drawn == 3:
            for _, logits_NZ in scores.parts:
                logits_NZ[:, 5] = torch.nan
        return scores

    engine.core.runner.run = torch.inference_mode()(spoilt)
    with pytest.raises(CheckpointError, match="nan logits"):
        list(engine.complete([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=9)))
    assert engine.admin.check_invariants() == [] and engine.metrics().pages_used == 0


def test_new_weights_find_nothing_under_way():
    engine = engine_of()
    heard: queue.SimpleQueue = queue.SimpleQueue()
    engine.complete([PROMPTS[0]], SamplingParams(seed=0, max_tokens=200, ignore_eos=True)).start(heard.put)
    for version in range(5):
        heard.get(timeout=60)
        engine.admin.weights_changed(str(version))
    engine.admin.abort()
    while not isinstance(heard.get(timeout=60), JobEnd):
        pass
    assert engine.admin.check_invariants() == [] and engine.metrics().pages_used == 0


def tell_what_is_left(patch):
    """The draws of rows that were planned too early."""
    tell = EngineCore._tell

    def all_of_them(self, plan, drawn, now):
        reasons = {row.sequence.name: row.sequence.content.finish_reason for row in plan.rows}
        for row in plan.rows:
            row.sequence.content.finish_reason = None
        told = tell(self, plan, drawn, now)
        for row in plan.rows:
            row.sequence.content.finish_reason = row.sequence.content.finish_reason or reasons[row.sequence.name]
        return told

    patch.setattr(EngineCore, "_tell", all_of_them)


def read_another_rows_token(patch):
    patch.setattr(DecodeInputs, "source", lambda self, row, awaited: 0 if awaited else self.most + row)


def forget_where_tokens_lie(patch):
    """A pass reads what the draw before the last one has left."""
    patch.setattr(DecodeInputs, "keep_drawn", lambda self, names, ids_N: self._place.update(dict.fromkeys(names, 0)))


@pytest.mark.parametrize("fault", [tell_what_is_left, read_another_rows_token, forget_where_tokens_lie])
def test_a_planted_fault_is_found(fault, monkeypatch):
    expected = finish(synchronous(), requests())
    fault(monkeypatch)
    assert finish(engine_of(), requests()) != expected
