"""Sampling against a plain Python oracle: which tokens survive, how often each is drawn, and from which stream."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from perilune.errors import CheckpointError, RequestError
from perilune.serve.filters import kept_weights, pick
from perilune.serve.request import FieldError, SamplingParams
from perilune.serve.sampling import Sampler, SamplingRow, adjusted, draw_rows, token_logprobs, uniforms


def oracle(logits: list[float], params: SamplingParams) -> list[float]:
    """Probabilities by the definition: sort, cut, renormalise, with Python floats."""
    largest = max(logits)
    weight = [math.exp((value - largest) / params.temperature) for value in logits]
    kept = set(range(len(logits)))
    if 0 < params.top_k < len(logits):
        threshold = sorted(logits, reverse=True)[params.top_k - 1]
        kept = {i for i in kept if logits[i] >= threshold}
    if params.top_p < 1.0:
        total = sum(weight[i] for i in kept)
        mass, threshold = 0.0, -math.inf
        for i in sorted(kept, key=lambda i: -logits[i]):
            mass += weight[i]
            threshold = logits[i]
            if mass >= params.top_p * total:
                break
        kept = {i for i in kept if logits[i] >= threshold}
    kept = {i for i in kept if weight[i] >= params.min_p}
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(logits))]


# Eighths are exact in fp32 and make ties common; at these temperatures their weights are far from equal or tied.
eighths = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=40)


@example([1.0, 0.0], 1.0, 0, 1.0, 1.0)
@given(
    eighths,
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.integers(0, 45),
    st.sampled_from([0.1, 0.37, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.013, 0.11, 0.57, 1.0]),
)
def test_kept_probabilities_equal_the_definition(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = kept_weights(torch.tensor([logits]), [params])[0].double()
    expected = torch.tensor(oracle(logits, params), dtype=torch.float64)
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights / weights.sum(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_beyond_the_shortlist_sorts_everything(top_p):
    logits = torch.randn(3, 5000)
    logits[1] *= 8  # one peaked row among flat ones
    params = SamplingParams(top_p=top_p)
    weights = kept_weights(logits, [params] * 3)
    for row in range(3):
        alone = kept_weights(logits[row : row + 1], [params])
        expected = torch.tensor(oracle(logits[row].tolist(), params))
        assert torch.equal(weights[row] > 0, expected > 0)
        assert torch.equal(weights[row], alone[0])


def test_draws_follow_the_distribution():
    """Chi-square of 20,000 draws against the exact probabilities, filtered and not."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    draws = 20_000
    for params in (SamplingParams(seed=1), SamplingParams(temperature=1.7, top_k=4, top_p=0.9, min_p=0.05, seed=2)):
        expected = torch.tensor(oracle(logits.tolist(), params), dtype=torch.float64)
        sampler = Sampler([params] * 500, stream=list(range(500)))
        drawn = torch.tensor([sampler.draw(logits.expand(500, -1)) for _ in range(draws // 500)])
        count = torch.bincount(drawn.flatten(), minlength=len(logits)).double()
        possible = expected > 0
        assert count[~possible].sum() == 0
        chi2 = ((count - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum().item()
        assert chi2 < 25.7, f"chi-square {chi2:.1f} with 5 degrees of freedom has p < 0.0001"  # 99.99 % quantile


def test_a_row_does_not_depend_on_its_batch():
    params = [
        SamplingParams(seed=7, top_p=0.9),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=9, temperature=0.6, top_k=5),
        SamplingParams(seed=7, top_p=0.9, min_p=0.02),
    ]
    steps = torch.randn(12, 4, 300)
    batched = Sampler(params)
    together = [batched.draw(step) for step in steps]
    for row, param in enumerate(params):
        alone = Sampler([param])
        assert [alone.draw(step[row : row + 1])[0] for step in steps] == [ids[row] for ids in together]


def test_keep_goes_on_with_each_rows_own_stream():
    params = [SamplingParams(seed=seed) for seed in (3, 4, 5)]
    logits = torch.randn(6, 3, 100)
    whole, shrinking = Sampler(params), Sampler(params)
    expected = [whole.draw(step) for step in logits]
    assert [shrinking.draw(step) for step in logits[:3]] == expected[:3]
    shrinking.keep([2, 0])
    assert [shrinking.draw(step[[2, 0]]) for step in logits[3:]] == [[ids[2], ids[0]] for ids in expected[3:]]


def test_greedy_takes_the_lowest_id_among_equals_and_needs_no_seed():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert Sampler([SamplingParams(temperature=0.0)]).draw(logits) == [1]
    assert Sampler([SamplingParams(top_k=1)]).draw(logits) == [1]


def test_extreme_temperatures_stay_finite():
    logits = torch.tensor([[-3e38, 0.0, 5.0, 3e38]])
    assert Sampler([SamplingParams(temperature=1e-30, seed=0)] * 1).draw(logits) == [3]
    weights = kept_weights(torch.tensor([[-math.inf, 0.0, 1.0]]), [SamplingParams(temperature=100.0)])
    assert weights[0, 0] == 0 and torch.isfinite(weights).all()


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_uniform_range_draw_possible_tokens(number):
    weights = kept_weights(torch.tensor([[-math.inf, 0.3, 0.1, -math.inf]]), [SamplingParams()])
    assert pick(weights, np.array([number])).tolist() == [1 if number == 0.0 else 2]


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((1, 64), -math.inf)
    logits[0, [5, 40]] = 0.0
    sampler = Sampler([SamplingParams(seed=0)])
    assert {sampler.draw(logits)[0] for _ in range(200)} == {5, 40}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(value, temperature):
    logits = torch.zeros(2, 8)
    logits[1, 3] = value
    with pytest.raises(CheckpointError, match="row 1"):
        Sampler([SamplingParams(temperature=temperature)] * 2).draw(logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", 101),
        ("temperature", True),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_ids", (-1,)),
        ("stop_ids", tuple(range(300))),
        ("min_tokens", 257),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", True),
        ("logit_bias", ((-1, 0.0),)),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),  # logits divided by it are not finite
        ("frequency_penalty", 2.5),
        ("presence_penalty", math.nan),
    ],
)
def test_values_out_of_range_name_the_field(field, value):
    with pytest.raises(FieldError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert isinstance(caught.value, RequestError)


def changed_oracle(
    logits: list[float], params: SamplingParams, prompt: list[int], said: list[int], ends: set[int]
) -> list[float]:
    """Logits after bias, penalties and forbidden tokens, one token at a time with Python floats."""
    out = []
    for token, logit in enumerate(logits):
        logit += sum(bias for biased, bias in params.logit_bias if biased == token)
        if token in prompt or token in said:
            factor = params.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        logit -= params.frequency_penalty * said.count(token)
        logit -= params.presence_penalty if token in said else 0.0
        if (params.ignore_eos or len(said) < params.min_tokens) and token in ends:
            logit = -math.inf
        if len(said) < params.min_tokens and token in params.stop_ids:
            logit = -math.inf
        out.append(logit)
    return out


tokens = st.integers(0, 9)


@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=10, max_size=10),
    st.lists(tokens, max_size=6),
    st.lists(tokens, max_size=6),
    st.lists(st.tuples(tokens, st.integers(-8, 8).map(float)), max_size=4),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from([0.0, 0.75, -0.25]),
    st.integers(0, 6),
    st.booleans(),
)
def test_bias_penalties_and_forbidden_tokens_equal_the_definition(
    logits, prompt, said, bias, repetition, frequency, presence, min_tokens, ignore_eos
):
    params = SamplingParams(
        logit_bias=tuple(bias), repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence,
        min_tokens=min_tokens, ignore_eos=ignore_eos, stop_ids=(3,),
    )  # fmt: skip
    row = SamplingRow(params, [*prompt, -5], ends={0, 1})  # an id below zero is an image's
    plain = SamplingRow(SamplingParams())
    given_logits = torch.tensor([logits, logits], dtype=torch.float64)
    for at, token in enumerate(said):
        if at == 2:  # the counts may become tensors at any time
            adjusted([row], given_logits[:1])
        row.take(torch.tensor([token]))
    expected = torch.tensor(changed_oracle(logits, params, prompt, said, {0, 1}), dtype=torch.float64)
    got = adjusted([row, plain], given_logits)
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-12)
    assert torch.equal(got[1], given_logits[1]), "a row without parameters was changed by its neighbour"
    assert given_logits[0].tolist() == logits, "the caller's logits were changed"


def test_any_batch_gives_each_row_what_it_draws_alone():
    """Rows of every kind come and go in random company; each draws what it draws alone."""
    kinds = [
        SamplingParams(seed=7, top_p=0.9),
        SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5, logprobs=2),
        SamplingParams(seed=9, temperature=0.6, top_k=5, repetition_penalty=1.5),
        SamplingParams(seed=7, top_p=0.9, min_p=0.02, logit_bias=((4, 3.0), (5, -100.0)), logprobs=0),
        SamplingParams(seed=1, top_k=40, min_tokens=5, stop_ids=(2,), temperature=1.5),
    ]
    steps, vocab = 12, 60
    logits = torch.randn(len(kinds), steps, vocab) * 2

    def make(kind: int) -> SamplingRow:
        return SamplingRow(kinds[kind], [1, 2, 3], ends={0})

    alone = []
    for kind in range(len(kinds)):
        row = make(kind)
        alone.append([draw_rows([row], logits[kind, step : step + 1])[0] for step in range(steps)])
    order = random.Random(0)
    rows = [make(kind) for kind in range(len(kinds))]
    while waiting := [kind for kind in range(len(kinds)) if rows[kind].drawn < steps]:
        batch = order.sample(waiting, order.randint(1, len(waiting)))
        places = [rows[kind].drawn for kind in batch]
        drawn = draw_rows([rows[kind] for kind in batch], torch.stack([logits[k, p] for k, p in zip(batch, places)]))
        for kind, place, one in zip(batch, places, drawn, strict=True):
            assert one == alone[kind][place]
    assert {token for token, _ in alone[4][:5]}.isdisjoint({0, 2}), "an end before min_tokens"


def test_a_grammar_that_only_allows_the_end_beats_min_tokens():
    row = SamplingRow(SamplingParams(min_tokens=5, ignore_eos=True), ends={3})
    mask = np.array([False, False, False, True])
    assert draw_rows([row], torch.zeros(1, 4), [mask])[0].token_id == 3
    wide = np.array([False, True, False, True])
    assert draw_rows([row], torch.zeros(1, 4), [wide])[0].token_id == 1


def test_random_numbers_are_uniform_and_unrelated():
    """Kolmogorov-Smirnov against the uniform law, and correlations of neighbours in place, stream and seed."""
    n = 20_000
    for places in (
        [(5, 0, i) for i in range(n)],
        [(i, 0, 0) for i in range(n)],
        [(5, i, 3) for i in range(n)],
        [(i, i, i) for i in range(n)],
    ):
        numbers = uniforms(places)
        assert numbers.min() >= 0 and numbers.max() < 1
        distance = np.abs(np.sort(numbers) - (np.arange(n) + 0.5) / n).max()
        assert distance < 2.2 / math.sqrt(n), distance  # p < 0.0002
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / math.sqrt(n)
    assert uniforms([(1, 2, 3)])[0] == uniforms([(9, 9, 9), (1, 2, 3)])[1]
    assert uniforms([(2**63 - 1, 7, 2**31)]).shape == (1,) and uniforms([]).shape == (0,)


def test_logprobs_equal_the_definition_and_ignore_what_sampling_changes():
    logits = torch.randn(3, 50, dtype=torch.float64) * 3
    expected = torch.log_softmax(logits, -1)
    rows = [
        SamplingRow(SamplingParams(logprobs=4, temperature=0.1, top_k=2, logit_bias=((7, 50.0),))),
        SamplingRow(SamplingParams()),
        SamplingRow(SamplingParams(logprobs=0, seed=3)),
    ]
    drawn = draw_rows(rows, logits)
    assert drawn[1].logprob is None
    for row in (0, 2):
        assert drawn[row].logprob.token_id == drawn[row].token_id
        assert drawn[row].logprob.logprob == pytest.approx(expected[row, drawn[row].token_id].item(), abs=1e-12)
    best = sorted(range(50), key=lambda token: -expected[0, token].item())[:4]
    assert [token for token, _ in drawn[0].logprob.top] == best and drawn[2].logprob.top == ()
    assert [value for _, value in drawn[0].logprob.top] == pytest.approx([expected[0, token].item() for token in best])
    tied = token_logprobs(torch.zeros(1, 6), [5], [6])[0]
    assert [token for token, _ in tied.top] == [0, 1, 2, 3, 4, 5]


def test_a_bias_outside_the_vocabulary_is_the_clients_mistake():
    params = SamplingParams(logit_bias=((60, 1.0),))
    params.check_vocabulary(61)
    with pytest.raises(FieldError, match="0..59"):
        params.check_vocabulary(60)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_a_distribution_gives_an_id_that_exists(value):
    """The next step embeds it before `Draw.read` has told the fault."""
    weights_NZ = torch.ones(3, 16)
    weights_NZ[1, 5] = value
    picked_N = pick(weights_NZ, np.array([0.5, 0.999, 0.5]))
    assert picked_N[0] == picked_N[2] == 8 and 0 <= picked_N[1] < 16
