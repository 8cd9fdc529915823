"""Sampling against a plain Python oracle: which tokens survive, how often each is drawn, and from which stream."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from perilune.errors import CheckpointError, RequestError
from perilune.serve.request import FieldError, SamplingParams
from perilune.serve.sampling import Sampler, kept_weights


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
    weights = kept_weights(torch.tensor([logits]), params)[0].double()
    expected = torch.tensor(oracle(logits, params), dtype=torch.float64)
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights / weights.sum(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_beyond_the_shortlist_sorts_everything(top_p):
    logits = torch.randn(3, 5000)
    logits[1] *= 8  # one peaked row among flat ones
    params = SamplingParams(top_p=top_p)
    weights = kept_weights(logits, params)
    for row in range(3):
        alone = kept_weights(logits[row : row + 1], params)
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
    weights = kept_weights(torch.tensor([[-math.inf, 0.0, 1.0]]), SamplingParams(temperature=100.0))
    assert weights[0, 0] == 0 and torch.isfinite(weights).all()


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_uniform_range_draw_possible_tokens(monkeypatch, number):
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor(number, dtype=torch.float64))
    logits = torch.tensor([[-math.inf, 0.3, 0.1, -math.inf]])
    assert Sampler([SamplingParams(seed=0)]).draw(logits) == [1 if number == 0.0 else 2]


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
    ],
)
def test_values_out_of_range_name_the_field(field, value):
    with pytest.raises(FieldError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert isinstance(caught.value, RequestError)
