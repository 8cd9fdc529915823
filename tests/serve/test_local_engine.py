"""An engine over a real tiny model: answers are the model's own, alone or together, and later turns start warm."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from fake_engine import FakeEngine
from tiny_model import TOKENIZER, scripted_engine, tiny_engine, tiny_model, uncached

from perilune.errors import RequestError
from perilune.serve.api.envelope import as_api_error
from perilune.serve.chat_session import ChatSession
from perilune.serve.engine import EngineClosed, EngineFailed, JobEnd
from perilune.serve.request import FieldError, SamplingParams, Service
from perilune.serve.schedule import ServiceClass
from perilune.serve.settings import EngineSettings
from perilune.tokenizer.xtml import render

PROMPTS = [list(b"def f(x):\n"), list(b"a"), list(b"import os, sys\nprint(")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
HELLO = [{"role": "user", "content": "Hi"}]


def oracle(engine, prompt: list[int], tokens: int) -> list[int]:
    """Greedy ids by running the whole text anew for every token, without any state."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(engine.core.runner.model(torch.tensor([ids])).logits_BTZ[0, -1, :288].argmax()))
    return ids[len(prompt) :]


def together(jobs):
    """Run jobs at once; returns once all have ended, raising the first error."""
    ends = [threading.Event() for _ in jobs]
    errors = []

    def listener(end):
        def hear(event):
            if isinstance(event, JobEnd):
                errors.extend([event.error] if event.error else [])
                end.set()

        return hear

    for job, end in zip(jobs, ends):
        job.start(listener(end))
    assert all(end.wait(60) for end in ends)
    if errors:
        raise errors[0]
    return jobs


def drawn(job):
    """Ids of all answers."""
    return [answer.token_ids for answer in job.answers]


def finish(job):
    """Run a job; returns (job, texts)."""
    texts = [""] * len(job.answers)
    for delta in job:
        texts[delta.row] += delta.text
    return job, texts


def turns(engine, params=GREEDY, questions=("Hi", "And then?", "Why?")):
    """Usage and text of each turn of one conversation."""
    session = ChatSession(engine, params)
    return [("".join(delta.text for delta in session.send(q)), session.usage) for q in questions], session


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def test_greedy_equals_rerunning_the_whole_text(engine):
    job, texts = finish(engine.complete(PROMPTS, GREEDY))
    for prompt, answer, text in zip(PROMPTS, job.answers, texts):
        assert answer.token_ids == oracle(engine, prompt, 12)
        assert answer.finish_reason == "length"
        assert answer.reader.text == text == engine.tokenizer.decode(answer.token_ids)


def test_rows_of_a_batch_do_not_change_each_other(engine):
    """Different lengths, different sampling, and rows that end early."""
    params = [
        SamplingParams(seed=5, max_tokens=9, temperature=2.0),
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(seed=6, max_tokens=14, temperature=1.5, top_p=0.9),
    ]
    jobs = together([engine.complete([prompt], param) for prompt, param in zip(PROMPTS, params)])
    for prompt, param, job in zip(PROMPTS, params, jobs):
        alone, _ = finish(tiny_engine().complete([prompt], param))
        assert drawn(job) == drawn(alone) and len(drawn(job)[0]) == param.max_tokens


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_later_turns_run_only_what_is_new_and_answer_the_same(seed, thinking):
    cached, session = turns(tiny_engine(seed, thinking=thinking))
    plain, _ = turns(tiny_engine(seed, thinking=thinking, settings=uncached()))
    assert [text for text, _ in cached] == [text for text, _ in plain]
    assert all(usage.cached_tokens == 0 for _, usage in plain)
    assert cached[0][1].cached_tokens == 0
    for turn in (1, 2):
        question = session.messages[: 2 * turn - 1]
        before = render(TOKENIZER, question, thinking=thinking, add_generation_prompt=False).ids
        usage = cached[turn][1]
        assert usage.prompt_tokens == plain[turn][1].prompt_tokens > usage.cached_tokens
        assert usage.cached_tokens >= len(before) // 4 * 4, "everything up to the last question is skipped"


def test_cached_tokens_are_those_that_did_not_run():
    engine = tiny_engine()
    _, (first,) = finish(engine.chat(HELLO, GREEDY))
    history = [*HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": "x"}]
    before = engine.core.runner.tokens_run
    job, _ = finish(engine.chat(history, SamplingParams(temperature=0.0, max_tokens=1)))
    assert engine.core.runner.tokens_run - before == job.usage.prompt_tokens - job.usage.cached_tokens
    assert job.usage.cached_tokens > 0


def test_t52_a_finished_request_still_serves_its_prompt():
    engine = tiny_engine()
    (first, texts), (second, again) = (finish(engine.chat(HELLO, GREEDY)) for _ in range(2))
    assert texts == again
    assert second.usage.cached_tokens == (first.usage.prompt_tokens - 1) // 4 * 4


def test_an_answer_cut_at_a_stop_string_goes_on_as_the_client_sends_it():
    """The drawn tokens go on behind the stop string; the next turn must not see them."""
    _, (full,) = finish(tiny_engine().chat(HELLO, GREEDY))
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=(full[3:6],))
    with_cache, session = turns(tiny_engine(), params)
    without, _ = turns(tiny_engine(settings=uncached()), params)
    assert [text for text, _ in with_cache] == [text for text, _ in without]
    assert session.messages[1]["content"] == full[: full.find(full[3:6])]


def test_a_changed_history_never_meets_a_state_of_another():
    engine = tiny_engine()
    turns(engine)
    other = [*HELLO, {"role": "assistant", "content": "changed"}, {"role": "user", "content": "x"}]
    job, texts = finish(engine.chat(other, GREEDY))
    assert texts == finish(tiny_engine(settings=uncached()).chat(other, GREEDY))[1]
    shared = len(render(TOKENIZER, [*HELLO, {"role": "assistant", "content": ""}], thinking=False).ids)
    assert 0 < job.usage.cached_tokens <= shared


def test_salts_never_share(engine):
    finish(engine.complete([b"secret " * 4], GREEDY, service=Service(cache_salt="a")))
    for salt, shared in (("b", False), ("a", True), ("", False)):
        job, _ = finish(engine.complete([b"secret " * 4], GREEDY, service=Service(cache_salt=salt)))
        assert (job.usage.cached_tokens > 0) == shared


def test_choices_of_one_request_share_the_prompt():
    params = SamplingParams(seed=4, temperature=3.0, max_tokens=6)
    engine = tiny_engine()
    job, texts = finish(engine.chat(HELLO, params, 3))
    assert len(set(texts)) == 3 and job.usage.completion_tokens == 18
    assert finish(tiny_engine().chat(HELLO, params))[1] == texts[:1]
    assert (job.usage.prompt_tokens, job.usage.cached_tokens) == (job.sequences[0].prompt, 0)
    again = job.usage.prompt_tokens - (job.usage.prompt_tokens - 1) // 4 * 4
    assert engine.core.runner.tokens_run == job.usage.prompt_tokens + 2 * again + 3 * 5


def test_completions_of_several_prompts(engine):
    prompts = ["def f", list(b"a = "), "import os\n"]
    job, texts = finish(engine.complete(prompts, GREEDY, n=2))
    for row, prompt in enumerate(prompts):
        alone = finish(tiny_engine().complete([prompt], GREEDY))[1][0]
        assert texts[2 * row] == texts[2 * row + 1] == alone
    assert job.usage.prompt_tokens == 5 + 4 + 10 and job.usage.completion_tokens == 72
    assert job.timing.tokens_per_second > 0 and job.timing.first_token_seconds >= job.timing.prefill_seconds > 0


def test_logprobs_are_the_models_own():
    engine = tiny_engine(dtype=torch.float64)
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=6, logprobs=3, prompt_logprobs=2)
    job = engine.complete([PROMPTS[2]], params)
    given = [one for delta in job for one in delta.logprobs]
    ids = PROMPTS[2] + drawn(job)[0]
    with torch.no_grad():
        logits = engine.core.runner.model(torch.tensor([ids])).logits_BTZ[0, :, :288]
    expected = torch.log_softmax(logits, -1)
    whole = [one for one in job.prompt_logprobs[0] if one is not None] + given
    assert job.prompt_logprobs[0][0] is None and [one.token_id for one in whole] == ids[1:]
    for at, one in enumerate(whole):
        assert one.logprob == pytest.approx(float(expected[at, one.token_id]), abs=1e-9)
        best = expected[at].topk(len(one.top))
        assert [token for token, _ in one.top] == best.indices.tolist()


def test_deltas_join_to_the_text_and_never_split_a_character():
    script = list(b"\xe6" + "月 月".encode() + b"\xe6")
    job = scripted_engine(script).complete([[65]], SamplingParams(temperature=0.0, max_tokens=len(script)))
    deltas = [delta.text for delta in job]
    assert "".join(deltas) == job.answers[0].reader.text == "\ufffd月 月\ufffd"
    assert "月" in deltas or "\ufffd月" in deltas


def test_stop_strings_and_stop_ids_end_an_answer_wherever_they_stand(engine):
    job, (full,) = finish(engine.complete([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=50)))
    stop, ids = full[5:8], drawn(job)[0]
    job, (text,) = finish(engine.complete([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=50, stop=(stop,))))
    assert (text, job.answers[0].finish_reason) == (full[: full.find(stop)], "stop") and len(drawn(job)[0]) < 50
    job, _ = finish(engine.complete([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=50, stop_ids=(ids[4],))))
    assert drawn(job) == [ids[: ids.index(ids[4]) + 1]] and job.answers[0].finish_reason == "stop"


def test_what_was_held_back_comes_out_when_an_answer_is_cut_short(engine):
    _, (text,) = finish(engine.complete([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=3)))
    params = SamplingParams(temperature=0.0, max_tokens=3, stop=(text[-1] + "never",))
    deltas = list(engine.complete([PROMPTS[0]], params))
    assert "".join(delta.text for delta in deltas) == text and deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("end", [TOKENIZER.special.eos, TOKENIZER.special.end_of_msg])
def test_end_tokens_end_an_answer(end):
    job = scripted_engine([end]).complete([[65]], GREEDY)
    assert [(d.text, d.finish_reason) for d in job] == [("", "stop")] and job.usage.completion_tokens == 1


def test_ids_beyond_the_tokenizer_are_never_drawn():
    padded = tiny_engine(vocab_size=300)
    model = padded.core.runner.model
    with torch.no_grad():
        model.lm_head.weight[288:] = model.lm_head.weight[:12] * 50
    job, _ = finish(padded.complete([PROMPTS[0]], SamplingParams(temperature=2.0, seed=0, max_tokens=40)))
    assert max(drawn(job)[0]) < 288


def test_the_answer_ends_where_the_context_does():
    engine = tiny_engine(context_length=40)
    job = engine.complete(["x" * 30], SamplingParams(max_tokens=500, seed=0))
    assert [delta.finish_reason for delta in job][-1] == "length" and job.usage.completion_tokens == 10
    with pytest.raises(FieldError, match="40") as caught:
        engine.complete(["x" * 40], GREEDY)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_bad_prompts_fail_before_anything_runs():
    engine = tiny_engine()
    for prompt in ("", [], [5, 288], [-1]):
        with pytest.raises(FieldError) as caught:
            engine.complete([prompt], GREEDY)
        assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="role"):
        engine.chat([{"role": "robot", "content": "x"}], GREEDY)
    assert engine.core.runner.tokens_run == 0


def test_closing_a_job_stops_it_before_the_next_token(engine):
    job = engine.chat(HELLO, SamplingParams(seed=0, max_tokens=500))
    for delta in job:
        assert delta.finish_reason is None
        job.close()
    assert job.usage.completion_tokens < 500
    session = ChatSession(engine, SamplingParams(seed=0, max_tokens=500))
    deltas = session.send("Hi")
    said = next(deltas).text
    deltas.close()
    assert (
        session.messages == [*HELLO, {"role": "assistant", "content": said}] and session.usage.completion_tokens < 500
    )
    assert engine.admin.check_invariants() == [] and engine.metrics().running == 0


def test_t22_stopping_at_any_point_leaves_all_pages_behind():
    engine = tiny_engine(settings=EngineSettings(unit=4, cache_bytes=2**20, chunk=8, step_tokens=16))
    heard = threading.Event()
    for after in range(0, 40, 7):
        jobs = [engine.complete([list(b"x" * 30), [after, 1, 2, 3, 4, 5]], GREEDY, n=2) for _ in range(3)]
        steps = engine.metrics().steps_total
        for job in jobs:
            job.start(lambda event: heard.set() if isinstance(event, JobEnd) else None)
        while engine.metrics().steps_total < steps + after and not all(job.ended for job in jobs):
            pass
        for job in jobs:
            job.close()
        assert engine.admin.check_invariants() == []
    snapshot = engine.metrics()
    assert (snapshot.running, snapshot.waiting, snapshot.pages_used) == (0, 0, 0)


def test_a_failing_step_fails_its_requests_and_nothing_else():
    engine = tiny_engine()
    expected = finish(tiny_engine().complete([PROMPTS[0]], GREEDY))[1]
    run, faults = engine.core.runner.run, [RuntimeError("device lost")]

    def faulty(plan, stage):
        scores = run(plan, stage)
        if faults:
            raise faults.pop()
        return scores

    engine.core.runner.run = faulty
    with pytest.raises(EngineFailed, match="device lost"):
        finish(engine.complete([PROMPTS[0]], GREEDY))
    assert engine.admin.check_invariants() == [] and engine.ready
    job, texts = finish(engine.complete([PROMPTS[0]], GREEDY))
    assert texts == expected and job.usage.cached_tokens == 0, "nothing of the failed step was entered"
    assert engine.metrics().failed_steps_total == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread ends by it
@pytest.mark.parametrize("where", ["step", "call"])
def test_a_device_that_refuses_everything_ends_the_engine(where, monkeypatch):
    """Whoever waits is told why, and who looks after the server can start another one."""
    engine = tiny_engine()
    monkeypatch.setattr(engine.core, "fatal", lambda error: "illegal" in str(error))
    jobs = [engine.complete([PROMPTS[0]], GREEDY) for _ in range(2)]

    def illegal(*_):
        raise RuntimeError("an illegal memory access")

    if where == "step":
        monkeypatch.setattr(engine.core.runner, "run", illegal)
        with pytest.raises(EngineClosed, match="stopped by a fault.*illegal memory access"):
            finish(jobs[0])
    else:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.core.call(illegal)
    engine.core._thread.join(10)
    assert engine.closed and not engine.ready
    with pytest.raises(EngineClosed):
        finish(jobs[1])


def test_weights_that_change_are_never_mixed():
    """T31: what the old weights computed is no hit, and what runs starts again."""
    engine, other = tiny_engine(), tiny_model(seed=1)
    expected = finish(tiny_engine(1).complete([PROMPTS[2]], GREEDY))[1]
    finish(engine.complete([PROMPTS[2]], GREEDY))
    engine.admin.pause()
    job = engine.complete([PROMPTS[2]], GREEDY)
    ended = threading.Event()
    job.start(lambda event: ended.set() if isinstance(event, JobEnd) else None)
    engine.core.call(lambda: engine.core.runner.model.load_state_dict(other.state_dict()))
    engine.admin.weights_changed("1")
    engine.admin.resume()
    assert ended.wait(60) and job.usage.cached_tokens == 0
    assert [answer.reader.text for answer in job.answers] == expected
    assert engine.admin.weights_version == "1"


def test_pins_and_explanations(engine):
    text = list(b"a pinned prefix of some length")
    finish(engine.complete([text], GREEDY))
    pin = engine.admin.pin([*text, 1], seconds=60)
    assert pin["tokens"] == len(text) // 4 * 4 == engine.admin.explain([*text, 1])["resume"]
    engine.admin.unpin(pin["name"])
    assert engine.admin.check_invariants() == []
    kinds = {page["kind"] for page in engine.admin.page_map()}
    assert kinds == {"free", "tokens", "state"}
    assert engine.admin.cache_events()[-1].prompt_tokens == len(text)


CLASSES = (ServiceClass(name="short", up_to=16), ServiceClass(name="long", up_to=2**62, cap=0.9))


@pytest.mark.parametrize("fault", [None, RuntimeError("device lost")])
def test_a_short_answer_is_told_before_the_rest_of_the_step_runs(fault):
    """And stands, if that fails."""
    engine = tiny_engine(settings=EngineSettings(unit=4, cache_bytes=2**23, classes=CLASSES, step_tokens=64))
    run, told, ended = engine.core.runner.run, [], queue.SimpleQueue()
    stages: list[int] = []

    def watched(plan, stage):
        stages.append(len(plan.stages))
        if stage == 1:
            assert sum(len(delta.token_ids) for delta in told) == 2, "the short one has spoken"
            if fault is not None:
                raise fault
        return run(plan, stage)

    engine.core.runner.run = watched
    long = engine.complete([list(bytes(200))], SamplingParams(temperature=0.0, max_tokens=2))
    short = engine.complete([PROMPTS[1]], SamplingParams(temperature=0.0, max_tokens=2))
    engine.core.pause()
    long.start(lambda event: isinstance(event, JobEnd) and ended.put(("long", event.error)))
    short.start(lambda event: ended.put(("short", event.error)) if isinstance(event, JobEnd) else told.append(event))
    engine.core.resume()
    errors = dict(ended.get(timeout=60) for _ in range(2))
    assert 2 in stages and errors["short"] is None and told[-1].finish_reason == "length"
    assert (errors["long"] is None) == (fault is None)
    assert engine.admin.check_invariants() == []
    engine.close()


def test_a_closed_engine_says_so():
    engine = tiny_engine()
    finish(engine.complete([PROMPTS[0]], GREEDY))
    engine.close()
    with pytest.raises(EngineClosed, match="closed"):
        list(engine.complete([PROMPTS[0]], GREEDY))


def test_clients_of_an_engine_that_closes_get_503():
    engine = tiny_engine()
    heard: queue.SimpleQueue = queue.SimpleQueue()
    engine.complete([PROMPTS[0]], SamplingParams(max_tokens=200, ignore_eos=True)).start(heard.put)
    heard.get(timeout=60)  # it runs
    engine.close()
    while not isinstance(event := heard.get(timeout=60), JobEnd):
        pass
    for error in (event.error, refused(engine)):
        answer = as_api_error(error)
        assert answer.status == 503 and "closed" in answer.message and "Retry-After" in answer.headers


def refused(engine) -> BaseException:
    """What a job is told that comes too late."""
    with pytest.raises(EngineClosed) as caught:
        engine.complete([PROMPTS[0]], GREEDY).start(print)
    return caught.value


def test_no_grad_mode_leaks_to_the_caller(engine):
    for _ in engine.complete([PROMPTS[0]], GREEDY):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_leaving_a_session_closes_its_job():
    engine = FakeEngine()
    session = ChatSession(engine, GREEDY)
    deltas = session.send("Hi")
    assert next(deltas).text == "Hel"
    deltas.close()
    assert engine.jobs[0].closed and session.messages[-1]["content"] == "Hel"


def test_a_question_that_does_not_fit_leaves_the_conversation_alone():
    session = ChatSession(tiny_engine(context_length=100), GREEDY, system="Be brief.")
    with pytest.raises(RequestError, match="100"):
        session.send("x" * 200)
    assert session.messages == [{"role": "system", "content": "Be brief."}]
