"""Prefill and decode against the plain model: same text in one pass, in chunks, alone, together, and from kept states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_generator

from perilune.serve.generator import Generator
from perilune.serve.request import FieldError, SamplingParams

PROMPTS = [list(b"def f(x):\n"), list(b"a"), list(b"import os, sys\nprint(")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def generator() -> Generator:
    return tiny_generator()


def oracle(generator: Generator, prompt: list[int], tokens: int) -> list[int]:
    """Greedy ids by running the whole text anew for every token, without any state."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(generator.model(torch.tensor([ids])).logits_BTZ[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_rerunning_the_whole_text(generator):
    for prompt, answer in zip(PROMPTS, generator.generate(PROMPTS, [GREEDY] * 3)):
        assert answer.token_ids == oracle(generator, prompt, 12)
        assert answer.finish_reason == "length"
        assert answer.text == generator.tokenizer.decode(answer.token_ids)


def test_rows_of_a_batch_do_not_change_each_other(generator):
    """Different lengths, different sampling, and rows that end early."""
    params = [
        SamplingParams(seed=5, max_tokens=9, temperature=2.0),
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(seed=6, max_tokens=14, temperature=1.5, top_p=0.9),
    ]
    together = generator.generate(PROMPTS, params)
    for prompt, param, answer in zip(PROMPTS, params, together):
        alone = generator.generate([prompt], [param])[0]
        assert (answer.token_ids, answer.text, answer.finish_reason) == (alone.token_ids, alone.text, "length")
        assert len(answer.token_ids) == param.max_tokens


@given(st.integers(1, 30))
def test_any_prefill_chunk_gives_the_same_scores(chunk):
    prompt = list(b"for i in range(10): pass")
    expected = tiny_generator().prefill(prompt)
    got = tiny_generator(prefill_chunk=chunk).prefill(prompt)
    torch.testing.assert_close(got.logits_1Z, expected.logits_1Z, rtol=1e-9, atol=1e-9)
    assert got.state.length == expected.state.length == got.run == len(prompt)


def test_continuing_from_a_kept_prefix_runs_only_the_rest(generator):
    prompt = list(b"class A:\n    def f(self):")
    whole = generator.generate([prompt], [GREEDY])[0]
    kept = generator.prefill(prompt[:9])
    before = generator.tokens_run
    prefix = generator.prefill(prompt, generator.copy(kept))
    assert generator.tokens_run - before == prefix.run == len(prompt) - 9
    generation = generator.start([prefix], [GREEDY])
    list(generation)
    assert generation.answers[0].token_ids == whole.token_ids
    assert (generation.usage.prompt_tokens, generation.usage.cached_tokens) == (len(prompt), 9)
    assert generator.tokens_run - before == len(prompt) - 9 + 11  # the last drawn token is not run
    # The kept prefix is untouched and serves again.
    assert generator.generate([prompt], [GREEDY])[0].token_ids == whole.token_ids
    assert kept.state.length == 9


def test_prompts_that_rows_share_are_run_and_counted_once(generator):
    prefix = generator.prefill(PROMPTS[0])
    params = [SamplingParams(seed=1, max_tokens=5, temperature=3.0)] * 3
    generation = generator.start([prefix] * 3, params, stream=[0, 1, 2])
    list(generation)
    usage = generation.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (len(PROMPTS[0]), 0, 15)
    drawn = [tuple(answer.token_ids) for answer in generation.answers]
    assert len(set(drawn)) == 3, "choices of one request repeat each other"
    again = generator.generate([PROMPTS[0]], [params[0]])[0]
    assert tuple(again.token_ids) == drawn[0]


def test_deltas_join_to_the_text_and_never_split_a_character(generator):
    """A head that can only say 月 (three bytes) and one broken byte before it."""
    moon = tiny_generator()
    with torch.no_grad():
        moon.model.lm_head.weight.zero_()
    script = list(b"\xe6" + "月 月".encode() + b"\xe6")
    draws = iter(script)

    class Scripted:
        def draw(self, logits):
            return [next(draws)]

    generation = moon.start([moon.prefill([65])], [SamplingParams(max_tokens=len(script))])
    generation._sampler = Scripted()
    deltas = [delta.text for delta in generation]
    assert "".join(deltas) == generation.answers[0].text == "\ufffd月 月\ufffd"
    assert all("\ufffd" not in text or text.strip("\ufffd月 ") == "" for text in deltas)
    assert "月" in deltas or "\ufffd月" in deltas


def test_stop_strings_end_an_answer_wherever_they_stand(generator):
    full = generator.generate([PROMPTS[0]], [SamplingParams(temperature=0.0, max_tokens=50)])[0]
    stop = full.text[5:8]
    where = full.text.find(stop)
    params = SamplingParams(temperature=0.0, max_tokens=50, stop=(stop,))
    answer = generator.generate([PROMPTS[0]], [params])[0]
    assert (answer.text, answer.finish_reason) == (full.text[:where], "stop")
    assert len(answer.token_ids) < 50


def test_what_was_held_back_comes_out_when_an_answer_is_cut_short(generator):
    text = generator.generate([PROMPTS[0]], [SamplingParams(temperature=0.0, max_tokens=3)])[0].text
    params = SamplingParams(temperature=0.0, max_tokens=3, stop=(text[-1] + "never",))
    generation = generator.start([generator.prefill(PROMPTS[0])], [params])
    deltas = list(generation)
    assert "".join(delta.text for delta in deltas) == text and deltas[-1].finish_reason == "length"


def test_stop_ids_and_end_tokens_end_an_answer(generator):
    full = generator.generate([PROMPTS[0]], [GREEDY])[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_ids=(full[4],))
    answer = generator.generate([PROMPTS[0]], [params])[0]
    assert answer.token_ids == full[: full.index(full[4]) + 1] and answer.finish_reason == "stop"
    for end in (generator.tokenizer.special.eos, generator.tokenizer.special.end_of_msg):
        ending = tiny_generator()
        with torch.no_grad():
            ending.model.lm_head.weight.zero_()
        prefix = ending.prefill([65])
        with torch.inference_mode():
            prefix.logits_1Z[0, end] = 1.0
        generation = ending.start([prefix], [GREEDY])
        assert [(d.text, d.finish_reason) for d in generation] == [("", "stop")]
        assert generation.usage.completion_tokens == 1


def test_finished_rows_leave_a_state_behind_their_tokens(generator):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (2, 6, 4)]
    prefixes = [generator.prefill(prompt) for prompt in PROMPTS]
    generation = generator.start(prefixes, params, keep_states=True)
    list(generation)
    for prompt, answer in zip(PROMPTS, generation.answers):
        seen = prompt + answer.token_ids[:-1]
        assert answer.state.length == len(seen)
        logits = generator.forward([answer.token_ids[-1:]], answer.state)
        expected = generator.prefill(seen + answer.token_ids[-1:]).logits_1Z
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_ids_beyond_the_tokenizer_are_never_drawn():
    padded = tiny_generator(vocab_size=300)
    with torch.no_grad():
        padded.model.lm_head.weight[288:] = padded.model.lm_head.weight[:12] * 50
    answer = padded.generate([PROMPTS[0]], [SamplingParams(temperature=2.0, seed=0, max_tokens=40)])[0]
    assert max(answer.token_ids) < 288


def test_an_empty_prompt_is_an_error(generator):
    with pytest.raises(FieldError, match="empty"):
        generator.prefill([])


def test_no_grad_mode_leaks_to_the_caller(generator):
    generation = generator.start([generator.prefill(PROMPTS[0])], [GREEDY])
    for _ in generation:
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
