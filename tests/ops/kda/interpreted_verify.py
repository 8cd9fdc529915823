"""The verify kernel against plain decoding, for every count of accepted drafts."""

from __future__ import annotations

import pytest
import torch
from test_kda_verify import by_plain_decoding, make_case, relative_error, run

from perilune.ops.choice import force
from perilune.ops.kda.verify import select


def test_select_takes_the_kernel() -> None:
    with force("triton"):
        assert select("cpu", torch.float32).implementation == "triton"


def test_every_count_equals_plain_decoding() -> None:
    """Eight drafts pending; nine rows accept 0 to 8 of them in one call."""
    case = make_case(batch=9, heads=1, key_dim=16, value_dim=32, taps=4, pending=8, length=2)
    counts = torch.arange(9, dtype=torch.int32)
    with force("triton"):
        got = run(case, counts)
    for x, truth, tolerance in zip(got, by_plain_decoding(case, counts), (3e-6, 1e-6, 0.0), strict=True):
        assert relative_error(x, truth) <= tolerance


@pytest.mark.parametrize(("taps", "lower_bound"), [(1, -5.0), (2, None), (3, -5.0), (6, None)])
def test_other_shapes(taps: int, lower_bound: float | None) -> None:
    """A convolution that reaches through the new window and the pending one into the stored one; K and V no power of two."""
    case = make_case(
        batch=3, heads=2, key_dim=20, value_dim=12, taps=taps, pending=2, length=3, lower_bound=lower_bound
    )
    counts = torch.tensor([0, 1, 2])
    with force("triton"):
        got = run(case, counts)
    for x, truth, tolerance in zip(got, by_plain_decoding(case, counts), (3e-6, 1e-6, 0.0), strict=True):
        assert relative_error(x, truth) <= tolerance


def test_without_a_pending_window_nothing_is_written() -> None:
    case = make_case(batch=2, heads=1, key_dim=16, value_dim=8, taps=4, pending=2, length=2) | {"pending": None}
    with force("triton"):
        o, state, window = run(case, None)
    assert relative_error(o, by_plain_decoding(case, None)[0]) < 3e-6
    assert torch.equal(state, case["state"]) and torch.equal(window, case["window"])


def test_t06_none_accepted_beside_a_poisoned_neighbour() -> None:
    """0 accepted leaves state and window alone; padding and the NaN slot beside it reach nobody."""
    case = make_case(batch=3, heads=1, key_dim=16, value_dim=8, taps=4, pending=2, length=2, slots=5)
    for slot in (0, 2, 4):
        case["state"][slot] = float("nan")
    index, counts = torch.tensor([1, -1, 3]), torch.tensor([0, 1, 2])
    with force("triton"):
        o, state, window = run(case, counts, index)
    assert (o[1] == 0).all() and o[[0, 2]].isfinite().all()
    assert torch.equal(state[1], case["state"][1]) and torch.equal(window[:3], case["window"][:3])
    truth = by_plain_decoding(case, counts, index=index)
    assert relative_error(state[3], truth[1][3]) < 1e-6 and relative_error(o[[0, 2]], truth[0][[0, 2]]) < 3e-6


def test_a_count_out_of_range_is_loud_and_harmless() -> None:
    case = make_case(batch=3, heads=1, key_dim=8, value_dim=8, taps=4, pending=2, length=2)
    with force("triton"):
        o, state, window = run(case, torch.tensor([3, -1, 1]))
    assert o[:2].isnan().all() and o[2].isfinite().all()
    assert torch.equal(state[:2], case["state"][:2]) and torch.equal(window[:2], case["window"][:2])
