"""Chat over a real tiny model: the second turn runs only what is new, and says what it would have said anyway."""

from __future__ import annotations

import pytest
import torch
from fake_engine import FakeEngine
from tiny_model import tiny_generator

from perilune.errors import RequestError
from perilune.serve.chat_session import ChatSession
from perilune.serve.kept_states import KeptStates
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import FieldError, SamplingParams
from perilune.tokenizer.xtml import render

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def render_chat(tokenizer, messages, **options) -> list[int]:
    return render(tokenizer, messages, **options).ids


def make(*, seed: int = 0, **options) -> LocalEngine:
    return LocalEngine(tiny_generator(seed), name="tiny", **options)


def ask(engine, messages, params=GREEDY, n=1):
    """(job, texts) of a whole chat request."""
    job = engine.chat(messages, params, n)
    texts = [""] * n
    for delta in job:
        texts[delta.row] += delta.text
    return job, texts


def turns(engine, params=GREEDY, questions=("Hi", "And then?", "Why?")):
    """Usage and text of each turn of one conversation."""
    session = ChatSession(engine, params)
    return [("".join(delta.text for delta in session.send(q)), session.usage) for q in questions], session


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_later_turns_run_only_what_is_new_and_answer_the_same(seed, thinking):
    cached, session = turns(make(seed=seed, thinking=thinking))
    plain, _ = turns(make(seed=seed, thinking=thinking, kept_states=0))
    assert [text for text, _ in cached] == [text for text, _ in plain]
    assert all(usage.cached_tokens == 0 for _, usage in plain)
    assert cached[0][1].cached_tokens == 0
    tokenizer = session.engine.tokenizer
    for turn in (1, 2):
        before = render_chat(tokenizer, session.messages[: 2 * turn], thinking=thinking, add_generation_prompt=False)
        usage = cached[turn][1]
        assert usage.cached_tokens == len(before), "the whole of the earlier turns is in the kept state"
        assert usage.prompt_tokens == plain[turn][1].prompt_tokens > usage.cached_tokens


def test_cached_tokens_are_counted_in_the_forward():
    engine = make()
    _, (first,) = ask(engine, [{"role": "user", "content": "Hi"}])
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "x"},
    ]
    before = engine.generator.tokens_run
    job = engine.chat(history, SamplingParams(temperature=0.0, max_tokens=1))
    next(iter(job))
    assert engine.generator.tokens_run - before == job.usage.prompt_tokens - job.usage.cached_tokens > 0


def test_an_answer_cut_at_a_stop_string_is_kept_as_the_client_will_send_it():
    """The drawn tokens go on behind the stop string; the next turn must not see them."""
    engine, plain = make(), make(kept_states=0)
    _, (full,) = ask(make(), [{"role": "user", "content": "Hi"}])
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=(full[3:6],))
    with_cache, session = turns(engine, params)
    without, _ = turns(plain, params)
    assert [text for text, _ in with_cache] == [text for text, _ in without]
    assert session.messages[1]["content"] == full[: full.find(full[3:6])]
    turn = render_chat(engine.tokenizer, session.messages[:2], thinking=False, add_generation_prompt=False)
    assert with_cache[1][1].cached_tokens == len(turn)


def test_text_that_does_not_encode_to_the_drawn_tokens_is_run_once_more():
    """Bytes that are no UTF-8 are shown as U+FFFD, and come back as its three bytes."""
    engine = make()
    with torch.no_grad():
        engine.generator.model.lm_head.weight[:, :] = 0
    question = [{"role": "user", "content": "Hi"}]
    prompt = render_chat(engine.tokenizer, question, thinking=False)
    prefix = engine.generator.prefill(prompt)
    with torch.inference_mode():
        prefix.logits_1Z[0, 0xE6] = 1.0
    engine.kept.keep(prefix)
    job, (text,) = ask(engine, question, SamplingParams(temperature=0.0, max_tokens=1))
    assert text == "\ufffd" and job.usage.cached_tokens == len(prompt)
    history = [*question, {"role": "assistant", "content": text}]
    turn = render_chat(engine.tokenizer, history, thinking=False, add_generation_prompt=False)
    kept = engine.kept.find(turn)
    assert kept.ids == turn
    expected = engine.generator.prefill(turn)
    for got, want in zip(kept.state.layers, expected.state.layers):
        for name in vars(got):
            length = min(getattr(got, name).shape[1], getattr(want, name).shape[1])
            torch.testing.assert_close(getattr(got, name)[:, :length], getattr(want, name)[:, :length])


def test_a_changed_history_never_meets_a_state_of_another():
    """A recurrent state cannot be cut back: a prompt that leaves the kept tokens early starts from their beginning."""
    engine = make()
    turns(engine)
    other = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "changed"},
        {"role": "user", "content": "x"},
    ]
    job, texts = ask(engine, other)
    assert texts == ask(make(kept_states=0), other)[1]
    assert job.usage.cached_tokens == len(render_chat(engine.tokenizer, other[:1], thinking=False))


def test_a_kept_state_serves_several_continuations():
    """Each goes on from a copy: the kept one stays where it is."""
    engine = make()
    _, (said,) = ask(engine, [{"role": "user", "content": "Hi"}])
    for question in ("first", "second way", "third"):
        history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
        turn = render_chat(engine.tokenizer, history, thinking=False, add_generation_prompt=False)
        job, texts = ask(engine, [*history, {"role": "user", "content": question}])
        assert job.usage.cached_tokens == len(turn)
        assert texts == ask(make(kept_states=0), [*history, {"role": "user", "content": question}])[1]
        assert engine.kept.find(turn).state.length == len(turn)


def test_asking_again_runs_nothing_of_the_prompt():
    engine = make()
    question = [{"role": "user", "content": "Hi"}]
    (first, texts), (second, again) = ask(engine, question), ask(engine, question)
    assert texts == again and second.usage.cached_tokens == second.usage.prompt_tokens == first.usage.prompt_tokens


def test_choices_of_one_request_share_the_prompt():
    engine = make()
    params = SamplingParams(seed=4, temperature=3.0, max_tokens=6)
    job, texts = ask(engine, [{"role": "user", "content": "Hi"}], params, n=3)
    assert len(set(texts)) == 3 and job.usage.completion_tokens == 18
    assert ask(make(), [{"role": "user", "content": "Hi"}], params)[1] == texts[:1]
    for text in texts:  # whichever is chosen, the conversation goes on from a kept state
        history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
        turn = render_chat(engine.tokenizer, history, thinking=False, add_generation_prompt=False)
        assert engine.kept.find(turn).ids == turn


def test_completions_of_several_prompts():
    engine = make()
    prompts = ["def f", list(b"a = "), "import os\n"]
    job = engine.complete(prompts, GREEDY, n=2)
    texts = [""] * 6
    for delta in job:
        texts[delta.row] += delta.text
    for row, prompt in enumerate(prompts):
        alone = "".join(delta.text for delta in make().complete([prompt], GREEDY))
        assert texts[2 * row] == texts[2 * row + 1] == alone
    assert job.usage.prompt_tokens == 5 + 4 + 10 and job.usage.completion_tokens == 72
    assert job.timing.tokens_per_second > 0


def test_the_answer_ends_where_the_context_does():
    engine = make(context_length=40)
    job = engine.complete(["x" * 30], SamplingParams(max_tokens=500, seed=0))
    assert [delta.finish_reason for delta in job][-1] == "length" and job.usage.completion_tokens == 10
    with pytest.raises(FieldError, match="40") as caught:
        engine.complete(["x" * 40], GREEDY)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_bad_prompts_fail_before_anything_runs():
    engine = make()
    for prompt in ("", [], [5, 288], [-1]):
        with pytest.raises(FieldError) as caught:
            engine.complete([prompt], GREEDY)
        assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="role"):
        engine.chat([{"role": "robot", "content": "x"}], GREEDY)
    assert engine.generator.tokens_run == 0


def test_closing_a_job_stops_it_before_the_next_token():
    engine = make()
    job = engine.chat([{"role": "user", "content": "Hi"}], SamplingParams(seed=0, max_tokens=50))
    for delta in job:
        assert delta.finish_reason is None
        job.close()
    assert job.usage.completion_tokens <= 3
    session = ChatSession(engine, SamplingParams(seed=0, max_tokens=50))
    deltas = session.send("Hi")
    said = next(deltas).text
    deltas.close()
    assert session.messages[1:] == [{"role": "assistant", "content": said}] and session.usage.completion_tokens < 50


def test_leaving_a_session_closes_its_job():
    engine = FakeEngine()
    session = ChatSession(engine, GREEDY)
    deltas = session.send("Hi")
    assert next(deltas).text == "Hel"
    deltas.close()
    assert engine.jobs[0].closed and session.messages[-1]["content"] == "Hel"


def test_a_question_that_does_not_fit_leaves_the_conversation_alone():
    session = ChatSession(make(context_length=100), GREEDY, system="Be brief.")
    with pytest.raises(RequestError, match="100"):
        session.send("x" * 200)
    assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_kept_states_are_few_and_the_least_used_go_first():
    generator = tiny_generator()
    kept = KeptStates(limit=2)
    for text in (b"a", b"ab", b"b"):
        kept.keep(generator.prefill(list(text)))
        kept.find(list(b"ab"))  # "ab" stays the last used
    assert len(kept) == 2
    assert kept.find(list(b"abc")).ids == list(b"ab") and kept.find(list(b"b")).ids == list(b"b")
    assert kept.find(list(b"a")) is None and kept.find([]) is None
    size = kept.nbytes
    kept.keep(generator.prefill(list(b"b")))
    assert kept.nbytes == size, "the same tokens are kept once"
    small = KeptStates(limit=5, max_bytes=size * 3 // 4)
    for text in (b"a", b"b"):
        small.keep(generator.prefill(list(text)))
    assert len(small) == 1 and small.nbytes <= small.max_bytes
    kept.clear()
    assert len(kept) == kept.nbytes == 0
