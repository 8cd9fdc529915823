"""The CUDA verify kernel, emulated on the CPU, against decode steps in float64: counts, gates, sizes, pools, guard bands."""

from __future__ import annotations

import pytest
import torch
from test_kda_verify import by_plain_decoding, make_case, relative_error
from torch import Tensor

from perilune.bench import gpu_decode
from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.kda.cuda import verify as cuda
from perilune.ops.kda.verify import Projections, kda_verify_step, select

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))

GUARD = 64
HALVES = ("new", "gate", "pending", "window")


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A copy amid NaN, and the memory around it."""
    around = torch.full((x.numel() + 2 * GUARD,), torch.nan, dtype=x.dtype)
    inside = around[GUARD:-GUARD].view(x.shape)
    inside.copy_(x)
    return inside, around


def half(case: dict) -> dict:
    """Activations in bfloat16, as the kernel takes them."""
    return {
        n: Projections(*(p.bfloat16() for p in x)) if isinstance(x, Projections) else x.bfloat16() if n in HALVES else x
        for n, x in case.items()
    }


def run(
    case: dict, counts: Tensor | None, index: Tensor | None = None, backwards: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, states and windows of the CUDA form; the case stays as it is."""
    state, beside = guarded(case["state"])
    window, beside_window = guarded(case["window"])
    with force("cuda"), emulated(backwards):
        assert select("cpu", torch.bfloat16).implementation == "cuda"
        reason = cuda.unsuitable(
            case["new"], case["gate"], case["pending"], window, state, case["conv_weight"].shape[1]
        )
        assert reason is None, reason
        o = kda_verify_step(
            case["new"], case["gate"], None if counts is None else case["pending"], counts, case["conv_weight"], window,
            case["A_log"], case["dt_bias"], case["norm_weight"], state, **case["numbers"], index_B=index,
        )  # fmt: skip
    for around in (beside, beside_window):
        assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all()
    return o, state, window


@pytest.mark.parametrize(
    ("sizes", "lower_bound"),
    [((128, 128, 4), -5.0), ((64, 64, 4), -5.0), ((128, 64, 3), None), ((64, 128, 2), -5.0)],
    ids=str,
)
def test_every_count_equals_plain_decoding(sizes: tuple[int, int, int], lower_bound: float | None) -> None:
    key_dim, value_dim, taps = sizes
    counts = torch.arange(10) if key_dim == 64 else torch.tensor([9, 3])
    case = half(make_case(
        batch=len(counts), heads=2, key_dim=key_dim, value_dim=value_dim, taps=taps, pending=9, length=9, lower_bound=lower_bound
    ))  # fmt: skip
    truth = by_plain_decoding(case, counts)
    got = run(case, counts)
    assert relative_error(got[0], truth[0]) < 3e-3  # outputs are rounded to bfloat16
    assert relative_error(got[1], truth[1]) < 2e-7
    assert torch.equal(got[2].double(), truth[2])
    assert all(torch.equal(x, y) for x, y in zip(run(case, counts, backwards=True), got, strict=True))


def poisoned(case: dict, counts: Tensor, taps: int) -> dict:
    """NaN in all that a call has no business to read: pending tokens that do not stand, and q of those that no convolution sees."""
    case = case | {"pending": Projections(*(x.clone() for x in case["pending"]))}
    heads, key_dim = case["numbers"]["num_heads"], case["numbers"]["key_dim"]
    for row, count in enumerate(counts.tolist()):
        for part in case["pending"]:
            part[row, count:] = torch.nan
        case["pending"].qkv_BTX[row, : max(count - taps + 1, 0), : heads * key_dim] = torch.nan
    return case


@pytest.mark.parametrize("taps", [2, 3, 4, 8])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 64)])
def test_what_is_not_accepted_is_not_read_and_rows_are_on_their_own(key_dim: int, value_dim: int, taps: int) -> None:
    counts = torch.arange(10)
    case = half(
        make_case(
            batch=10, heads=1, key_dim=key_dim, value_dim=value_dim, taps=taps, pending=9, length=9, lower_bound=-1.0
        )
    )
    truth, got = by_plain_decoding(case, counts), run(case, counts)
    assert relative_error(got[0], truth[0]) < 3e-3 and torch.equal(got[2].double(), truth[2])
    for row in range(10):
        assert relative_error(got[1][row], truth[1][row]) < 2e-7
    case = poisoned(case, counts, taps)
    for backwards in (False, True):
        assert all(torch.equal(x, y) for x, y in zip(run(case, counts, backwards=backwards), got, strict=True))
    for row in (0, 1, 9):
        alone = {
            n: Projections(*(p[row : row + 1] for p in x)) if isinstance(x, Projections) else x for n, x in case.items()
        }
        alone |= {n: case[n][row : row + 1] for n in ("gate", "window", "state")}
        assert all(torch.equal(x[0], y[row]) for x, y in zip(run(alone, counts[row : row + 1]), got, strict=True))


def test_outputs_do_not_depend_on_tokens_behind_them() -> None:
    case = half(make_case(batch=3, heads=1, key_dim=64, value_dim=128, taps=4, pending=9, length=9))
    counts = torch.tensor([0, 4, 9])
    whole = run(case, counts)
    for length in range(1, 9):
        short = case | {"new": Projections(*(x[:, :length] for x in case["new"])), "gate": case["gate"][:, :length]}
        got = run(short, counts)
        assert torch.equal(got[0], whole[0][:, :length]), length
        assert torch.equal(got[1], whole[1]) and torch.equal(got[2], whole[2])


@pytest.mark.parametrize("part", ["q", "k", "v", "decay", "beta"])
def test_a_token_that_is_not_a_number_leaves_those_before_it_alone(part: str) -> None:
    case = half(make_case(batch=2, heads=1, key_dim=64, value_dim=64, taps=4, pending=9, length=9))
    counts = torch.tensor([0, 9])
    whole = run(case, counts)
    for token in (0, 1, 5, 8):
        new = Projections(*(x.clone() for x in case["new"]))
        if part in "qkv":
            new.qkv_BTX[:, token, 64 * "qkv".index(part) + 3] = torch.nan
        else:
            {"decay": new.decay_logit_BTHK, "beta": new.beta_logit_BTH}[part][:, token, 0] = torch.nan
        got = run(case | {"new": new}, counts)
        assert torch.equal(got[0][:, :token], whole[0][:, :token])
        assert got[0][:, token].isnan().all()
        assert torch.equal(got[1], whole[1]) and torch.equal(got[2], whole[2])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_equal_keys_written_with_full_strength(sign: float) -> None:
    """Each token takes away what the one before it wrote: nothing may grow from token to token."""
    case = half(make_case(batch=2, heads=1, key_dim=64, value_dim=64, taps=2, pending=9, length=9))
    for part in (case["new"], case["pending"]):
        part.qkv_BTX[..., :128] = part.qkv_BTX[:1, :1, :128]
        part.beta_logit_BTH[:] = 9.0
        part.decay_logit_BTHK[:] = -20.0  # nothing decays
    case["conv_weight"][:, 0] = 0.0
    for part in (case["new"], case["pending"]):
        part.qkv_BTX[:, ::2, 64:128] *= sign
    counts = torch.tensor([9, 6])
    truth, got = by_plain_decoding(case, counts), run(case, counts)
    assert relative_error(got[0], truth[0]) < 3e-3
    assert relative_error(got[1], truth[1]) < 3e-7
    assert all(torch.equal(x, y) for x, y in zip(run(case, counts, backwards=True), got, strict=True))


def test_short_windows_and_none_pending() -> None:
    case = half(make_case(batch=2, heads=1, key_dim=64, value_dim=64, taps=4, pending=3, length=2))
    counts = torch.tensor([3, 1])
    for given in (counts, None):
        truth, got = by_plain_decoding(case, given), run(case, given)
        assert relative_error(got[0], truth[0]) < 3e-3 and relative_error(got[1], truth[1]) < 2e-7
    assert torch.equal(got[1], case["state"]), "nothing is pending, nothing is written"


def test_pools_padding_and_numbers_out_of_range() -> None:
    case = half(make_case(batch=5, heads=2, key_dim=64, value_dim=64, taps=4, pending=4, length=3, slots=7))
    index = torch.tensor([6, -1, 7, 2, 0])  # row 2: no such slot
    counts = torch.tensor([4, 1, 2, 5, 0])  # row 3: too many
    truth = by_plain_decoding(case, torch.tensor([4, 0, 0, 0, 0]), index=torch.tensor([6, -1, -1, -1, 0]))
    got = run(case, counts, index)
    assert (got[0][1] == 0).all() and got[0][2:4].isnan().all()
    assert relative_error(got[0][[0, 4]], truth[0][[0, 4]]) < 3e-3
    assert relative_error(got[1], truth[1]) < 2e-7 and torch.equal(got[2].double(), truth[2])


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_long_decays_keep_their_last_digits(logit: float) -> None:
    """A decay of exp(-5) for each of 18 tokens leaves 1e-39, which is 0 here: products of decays, taken step by step, do not care."""
    case = half(make_case(batch=1, heads=1, key_dim=64, value_dim=64, taps=4, pending=9, length=9))
    for part in (case["new"], case["pending"]):
        part.decay_logit_BTHK[..., ::2] = logit
    counts = torch.tensor([9])
    truth, got = by_plain_decoding(case, counts), run(case, counts)
    assert relative_error(got[0], truth[0]) < 3e-3
    assert relative_error(got[1], truth[1]) < 1e-6, "what a decay's own exponent is rounded by, and no more"


def test_the_windows_that_are_timed_are_taken() -> None:
    """Else a row of the bench would be another kernel's time."""
    assert gpu_decode.DRAFTS + 1 <= min(cuda.MOST_FOLDED, cuda.MOST_SCORED)
    assert gpu_decode.SIZE in cuda.DIMS


def test_what_the_kernel_does_not_take_is_said() -> None:
    case = half(make_case(batch=1, heads=1, key_dim=64, value_dim=64, taps=4, pending=10, length=10))
    new, gate, window, state = (case[n] for n in ("new", "gate", "window", "state"))
    few = Projections(*(x[:, :8] for x in case["pending"]))
    with emulated():
        assert "9 tokens at most" in str(cuda.unsuitable(new, gate, None, window, state, 4))
        assert "folds 9" in str(cuda.unsuitable(few, gate, case["pending"], window, state, 4))
        assert "64 or 128" in str(cuda.unsuitable(few, gate, few, window, state[..., :32], 4))
        assert "two taps" in str(cuda.unsuitable(few, gate, few, window, state, 1))
        assert "not float32" in str(cuda.unsuitable(few, gate.float(), few, window, state, 4))
        odd = few._replace(decay_logit_BTHK=torch.zeros(1, 8, 65).bfloat16()[..., 1:].unflatten(-1, (1, 64)))
        assert "even numbers" in str(cuda.unsuitable(odd, gate, few, window, state, 4))
        assert cuda.unsuitable(few, gate, few, window, state, 4) is None
