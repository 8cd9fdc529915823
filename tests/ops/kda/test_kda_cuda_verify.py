"""The CUDA verify kernel, emulated on the CPU, against plain decoding in float64: counts, pools, gates, sizes."""

from __future__ import annotations

import pytest
import torch
from test_kda_verify import by_plain_decoding, converted, make_case, relative_error
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.kda.cuda import verify as cuda
from perilune.ops.kda.verify import Projections, kda_verify_step, select

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))

HALVES = ("new", "gate", "pending", "window")


def rounded(case: dict) -> dict:
    """Activations and windows in bfloat16."""
    return {name: converted({name: x}, torch.bfloat16)[name] if name in HALVES else x for name, x in case.items()}


def run(case: dict, counts: Tensor | None, index: Tensor | None = None, backwards: bool = False) -> tuple[Tensor, ...]:
    case = {name: x.clone() if isinstance(x, Tensor) else x for name, x in case.items()}
    with force("cuda"), emulated(backwards):
        taps = case["conv_weight"].shape[1]
        assert cuda.unsuitable(case["new"], case["pending"], case["window"], case["state"], taps) is None
        o = kda_verify_step(
            case["new"], case["gate"], case["pending"], counts, case["conv_weight"], case["window"], case["A_log"],
            case["dt_bias"], case["norm_weight"], case["state"], **case["numbers"], index_B=index,
        )  # fmt: skip
    return o, case["state"], case["window"]


def check(case: dict, counts: Tensor | None, index: Tensor | None = None) -> None:
    got, truth = run(case, counts, index), by_plain_decoding(case, counts, index=index)
    for x, expected, tolerance in zip(got, truth, (4e-3, 1e-6, 0.0), strict=True):  # outputs are rounded to bfloat16
        assert relative_error(x, expected) <= tolerance


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_every_count_equals_plain_decoding(lower_bound: float | None) -> None:
    """Three drafts pending; four rows accept 0 to 3 of them in one call."""
    case = make_case(batch=4, heads=1, key_dim=64, value_dim=64, taps=4, pending=3, length=2, lower_bound=lower_bound)
    check(rounded(case), torch.arange(4, dtype=torch.int32))


def test_whole_heads_of_k3() -> None:
    case = make_case(batch=2, heads=2, key_dim=128, value_dim=128, taps=4, pending=2, length=3)
    check(rounded(case), torch.tensor([2, 1]))


def test_a_pool_with_padding() -> None:
    case = make_case(batch=3, heads=1, key_dim=64, value_dim=128, taps=3, pending=2, length=1, slots=5)
    check(rounded(case), torch.tensor([1, 2, 2]), torch.tensor([4, -1, 0], dtype=torch.int32))


def test_the_first_window_has_nothing_to_fold() -> None:
    case = rounded(make_case(batch=1, heads=2, key_dim=64, value_dim=64, taps=4, pending=1, length=4)) | {
        "pending": None
    }
    o, state, window = run(case, None)
    assert torch.equal(state, case["state"]) and torch.equal(window, case["window"])
    truth, *_ = by_plain_decoding(case | {"pending": Projections(*(x[:, :0] for x in case["new"]))}, torch.tensor([0]))
    assert relative_error(o, truth) < 4e-3


def test_counts_out_of_range_give_nan_and_touch_nothing() -> None:
    case = rounded(make_case(batch=2, heads=1, key_dim=64, value_dim=64, taps=4, pending=1, length=1))
    o, state, window = run(case, torch.tensor([2, 1], dtype=torch.int32))
    assert o[0].isnan().all() and o[1].isfinite().all()
    assert torch.equal(state[0], case["state"][0]) and torch.equal(window[0], case["window"][0])
    assert not torch.equal(state[1], case["state"][1])


def test_the_order_of_warps_and_the_number_of_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = rounded(make_case(batch=2, heads=2, key_dim=64, value_dim=64, taps=4, pending=2, length=2))
    results = []
    for blocks, backwards in ((1, False), (3, True)):
        monkeypatch.setattr(cuda, "units", lambda device, blocks=blocks: blocks)
        results.append(run(case, torch.tensor([2, 1]), backwards=backwards))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_more_tokens_than_fit_go_elsewhere() -> None:
    case = rounded(make_case(batch=1, heads=1, key_dim=64, value_dim=64, taps=4, pending=12, length=13))
    with emulated(), force("cuda"):
        assert "at most 24 tokens" in str(
            cuda.unsuitable(case["new"], case["pending"], case["window"], case["state"], 4)
        )
        assert select("cpu", torch.bfloat16).implementation == "cuda"
