"""Folding accepted drafts and scoring the next window equals decoding one token after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.kda.decode import kda_decode_step
from perilune.ops.kda.verify import Projections, kda_verify_step, select


def relative_error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-300))


def make_case(
    *, batch: int, heads: int, key_dim: int, value_dim: int, taps: int, pending: int, length: int,
    slots: int | None = None, lower_bound: float | None = -5.0,
) -> dict:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    channels, slots = heads * (2 * key_dim + value_dim), batch if slots is None else slots

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def projections(tokens: int) -> Projections:
        return Projections(
            normal(batch, tokens, channels), normal(batch, tokens, heads, key_dim), normal(batch, tokens, heads)
        )

    return {
        "new": projections(length), "gate": normal(batch, length, heads, value_dim), "pending": projections(pending),
        "conv_weight": normal(channels, taps), "window": normal(slots, channels, taps - 1), "A_log": 0.3 * normal(heads),
        "dt_bias": normal(heads * key_dim), "norm_weight": normal(value_dim),
        "state": normal(slots, heads, value_dim, key_dim),
        "numbers": {
            "num_heads": heads, "key_dim": key_dim, "lower_bound": lower_bound, "scale": key_dim**-0.5, "norm_eps": 1e-5,
        },
    }  # fmt: skip


def converted(case: dict, dtype: torch.dtype) -> dict:
    """The case on tensors of its own."""

    def own(x):
        if isinstance(x, Projections):
            return Projections(*(own(part) for part in x))
        return x.to(dtype, copy=True) if isinstance(x, Tensor) else x

    return {name: own(x) for name, x in case.items()}


def run(case: dict, counts: Tensor | None, index: Tensor | None = None, dtype: torch.dtype = torch.float32):
    """Outputs of the new window, states and windows after the call; the case itself stays as it is."""
    case = converted(case, dtype)
    o = kda_verify_step(
        case["new"], case["gate"], case["pending"], counts, case["conv_weight"], case["window"], case["A_log"],
        case["dt_bias"], case["norm_weight"], case["state"], **case["numbers"], index_B=index,
    )  # fmt: skip
    return o, case["state"], case["window"]


def by_plain_decoding(
    case: dict, counts: Tensor | None, dtype: torch.dtype = torch.float64, index: Tensor | None = None
):
    """Row by row and token by token: the accepted ones, then the new ones on a copy of the state."""
    case = converted(case, dtype)
    outputs = torch.zeros(*case["gate"].shape[:2], case["gate"][0, 0].numel(), dtype=dtype)
    for row in range(len(outputs)):
        slot = row if index is None else int(index[row])
        if slot < 0:
            continue
        state, window = case["state"][slot : slot + 1], case["window"][slot : slot + 1]

        def decode(part: Projections, t: int, gate: Tensor, window: Tensor, state: Tensor) -> Tensor:
            qkv, decay, beta = (x[row : row + 1, t] for x in part)  # noqa: B023
            return kda_decode_step(
                qkv, case["conv_weight"], window, decay, case["A_log"], case["dt_bias"], beta, gate,
                case["norm_weight"], state, **case["numbers"],
            )  # fmt: skip

        for t in range(0 if counts is None else int(counts[row])):
            decode(case["pending"], t, case["gate"][row : row + 1, 0], window, state)
        state, window = state.clone(), window.clone()
        for t in range(outputs.shape[1]):
            outputs[row, t] = decode(case["new"], t, case["gate"][row : row + 1, t], window, state)[0]
    return outputs, case["state"], case["window"]


@pytest.mark.parametrize("accepted", range(9))
def test_every_count_equals_plain_decoding(accepted: int) -> None:
    case = make_case(batch=2, heads=2, key_dim=8, value_dim=12, taps=4, pending=8, length=9)
    counts = torch.tensor([accepted, 8 - accepted])
    got, truth = run(case, counts, dtype=torch.float64), by_plain_decoding(case, counts)
    assert all(relative_error(x, y) < 1e-14 for x, y in zip(got, truth, strict=True))
    for x, y in zip(run(case, counts), truth, strict=True):
        assert relative_error(x, y) < 3e-6


def test_a_chain_of_windows_equals_decoding_the_tokens_that_stood() -> None:
    """Accept k, then go on: the state must be the accepted one and never that of a rejected draft (traps T06, T24)."""
    case = converted(make_case(batch=1, heads=2, key_dim=8, value_dim=6, taps=4, pending=4, length=4), torch.float64)
    plain_state, plain_window = case["state"].clone(), case["window"].clone()
    generator = torch.Generator().manual_seed(1)
    pending, counts = None, None
    for accepted in (4, 1, 0, 2, 3):
        new = Projections(*(torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in case["new"]))
        o = run_in_place(case, new, pending, counts)
        for t in range(4):
            if t == accepted:
                kept = plain_state.clone(), plain_window.clone()
            qkv, decay, beta = new.token(t)
            truth = kda_decode_step(
                qkv, case["conv_weight"], plain_window, decay, case["A_log"], case["dt_bias"], beta, case["gate"][:, t],
                case["norm_weight"], plain_state, **case["numbers"],
            )  # fmt: skip
            assert relative_error(o[:, t], truth) < 1e-13
        if accepted < 4:
            plain_state, plain_window = kept
        pending, counts = new, torch.tensor([accepted])
    run_in_place(case, new, pending, counts)
    assert relative_error(case["state"], plain_state) < 1e-13 and torch.equal(case["window"], plain_window)


def run_in_place(case: dict, new: Projections, pending: Projections | None, counts: Tensor | None) -> Tensor:
    return kda_verify_step(
        new, case["gate"], pending, counts, case["conv_weight"], case["window"], case["A_log"], case["dt_bias"],
        case["norm_weight"], case["state"], **case["numbers"],
    )  # fmt: skip


def test_pool_rows_and_padding() -> None:
    case = make_case(batch=3, heads=1, key_dim=8, value_dim=6, taps=3, pending=2, length=2, slots=5)
    case["state"][0] = float("nan")
    index, counts = torch.tensor([4, -1, 2]), torch.tensor([1, 2, 0])
    got, truth = run(case, counts, index, torch.float64), by_plain_decoding(case, counts, index=index)
    assert torch.equal(got[1][2], case["state"][2].double()) and (got[0][1] == 0).all()
    for x, y in zip(got, truth, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_the_first_window_has_no_pending_one() -> None:
    case = make_case(batch=2, heads=1, key_dim=8, value_dim=6, taps=4, pending=2, length=3) | {"pending": None}
    o, state, window = run(case, None, dtype=torch.float64)
    assert relative_error(o, by_plain_decoding(case, None)[0]) < 1e-14
    assert torch.equal(state, case["state"].double()) and torch.equal(window, case["window"].double())


def test_misuse_is_refused() -> None:
    case = make_case(batch=2, heads=1, key_dim=8, value_dim=6, taps=4, pending=2, length=2)
    with pytest.raises(ConfigError, match=r"\[3, 0\].*0\.\.2"):
        run(case, torch.tensor([3, 0]))
    with pytest.raises(ConfigError, match="or neither"):
        run(case, None)
    with pytest.raises(ConfigError, match=r"\[1\].*2 rows"):
        run(case, torch.tensor([1]))
    with pytest.raises(ConfigError, match="22 channels.*2 heads"):
        run(case | {"numbers": case["numbers"] | {"num_heads": 2}}, torch.tensor([1, 1]))
    with pytest.raises(ConfigError, match="softplus.*needs A_log"):
        run(case | {"A_log": None, "numbers": case["numbers"] | {"lower_bound": None}}, torch.tensor([1, 1]))
    for index in (torch.tensor([0]), torch.tensor([0, 1], dtype=torch.int16)):
        with pytest.raises(ConfigError, match=r"index has shape.*need \[2\] of int32 or int64"):
            run(case, torch.tensor([1, 1]), index)
    with pytest.raises(ConfigError, match="state.*must be"):
        run(case | {"state": case["state"][:1]}, torch.tensor([1, 1]))


def test_select_names_what_a_step_runs() -> None:
    with force("torch"):
        choice = select("cpu", torch.float32)
    assert choice.implementation == "torch" and "decode step a token" in choice.reason


@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_a_decode_step_on_a_pool_touches_the_named_slots_alone(implementation: str) -> None:
    case = make_case(batch=3, heads=1, key_dim=8, value_dim=6, taps=4, pending=1, length=1, slots=5)
    qkv, decay, beta = case["new"].token(0)

    def decode(index: Tensor | None, rows: list[int], state: Tensor, window: Tensor) -> Tensor:
        with force(implementation):
            return kda_decode_step(
                qkv[rows], case["conv_weight"], window, decay[rows], case["A_log"], case["dt_bias"], beta[rows],
                case["gate"][rows, 0], case["norm_weight"], state, **case["numbers"], index_B=index,
            )  # fmt: skip

    state, window = case["state"].clone(), case["window"].clone()
    assert (decode(torch.tensor([-1, -1, -1]), [0, 1, 2], state, window) == 0).all()
    assert torch.equal(state, case["state"]) and torch.equal(window, case["window"])
    got = decode(torch.tensor([4, -1, 2]), [0, 1, 2], state, window)
    plain_state, plain_window = case["state"][[4, 2]], case["window"][[4, 2]]
    assert torch.equal(got[[0, 2]], decode(None, [0, 2], plain_state, plain_window)) and (got[1] == 0).all()
    assert torch.equal(state[[4, 2]], plain_state) and torch.equal(window[[4, 2]], plain_window)
    assert torch.equal(state[[0, 1, 3]], case["state"][[0, 1, 3]])
