"""`prepare` as a CUDA kernel against its definition in float64: emulated on every machine, on the GPU where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from prepare_oracle import CHUNK, Inputs, errors, expected, inputs, setting

from perilune.ops.cuda import emulated, emulator
from perilune.ops.kda import recurrent_kda_reference
from perilune.ops.kda.cuda import prepare as stage
from perilune.ops.kda.gpu.forward import Prepared, Setting

LIMITS = {
    "Qd": 2.2e-3,
    "Kd": 2.2e-3,
    "Kr": 2.2e-3,
    "P": 4e-3,
    "A": 3e-3,
    "gamma": 1e-5,
    "beta": 1e-6,
}  # bfloat16: 2^-9 each
GUARD = 4096  # elements on either side of an output, NaN


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu" and (reason := emulator.missing()):
        pytest.skip(reason)
    with emulated():
        yield request.param


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """An output of NaN between guards of NaN; and the whole."""
    size = math.prod(shape)
    whole = torch.full((size + 2 * GUARD,), float("nan"), dtype=dtype, device=device)
    return whole[GUARD : GUARD + size].view(shape), whole


def run(x: Inputs, s: Setting, device: str, whole: bool = True, full: bool = False) -> Prepared:
    """Run the kernel; everything is written, and nothing beside it."""
    x = x.to(device)
    assert stage.unsuitable(x.q, x.k, x.g, x.beta, s, full) is None
    chunks, (heads, key_dim) = len(x.chunks), x.g.shape[1:]
    square, rows = (chunks, heads, CHUNK, CHUNK), (chunks, heads, CHUNK, key_dim)
    made = [guarded(shape, torch.bfloat16, device) for shape in (rows, rows, rows, square, square)]
    made += (guarded((chunks, heads, size), torch.float32, device) for size in (key_dim, CHUNK))
    out = Prepared(*(view for view, _ in made))
    stage.run(x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.chunks, s, out, whole, full)
    for view, around in made:
        assert around.isnan().sum() == around.numel() - view.numel() + view.isnan().sum()
        assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all(), "wrote beside an output"
    return out


def check(x: Inputs, s: Setting, device: str, **limits: float) -> None:
    found = errors(run(x, s, device), expected(x, s))
    allowed = LIMITS | limits
    assert all(error <= allowed[name] for name, error in found.items()), found


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(64, 37), (1, 16, 33, 32, 63)])
def test_ragged_chunks(key_dim: int, lengths: tuple[int, ...], device: str) -> None:
    check(inputs(lengths, key_dim=key_dim), setting(), device)


@pytest.mark.parametrize("key_dim", [64, 128])
def test_only_whole_chunks(key_dim: int, device: str) -> None:
    """The same bits without the table."""
    x = inputs((64, 64), key_dim=key_dim)
    expected_bits = run(x, setting(), device)
    x.chunks = torch.full_like(x.chunks, -1)
    for a, b in zip(run(x, setting(), device, full=True), expected_bits, strict=True):
        assert torch.equal(a, b)


def test_blocks_above_the_diagonal_are_left_out(device: str) -> None:
    """Those alone, for the kernels that do not read them."""
    for x in (inputs(), inputs(key_dim=64)):
        part, every = run(x, setting(), device, whole=False), run(x, setting(), device)
        block = torch.arange(CHUNK, device=device) // 16
        above = block[:, None] < block
        for name in Prepared._fields:
            a, b = getattr(part, name), getattr(every, name)
            if name in ("P", "A"):
                assert a[..., above].isnan().all() and (b[..., above] == 0).all(), name
                a, b = a[..., ~above], b[..., ~above]
            assert torch.equal(a, b), name


def test_value_heads_share_a_key_head(device: str) -> None:
    check(inputs(qk_heads=2, heads=6), setting(), device)


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("scale", [1.0, 128**-0.5])
def test_t05_t09_values_taken_as_they_are(key_dim: int, scale: float, device: str) -> None:
    """Natural logarithms in float32, no norm, no sigmoid."""
    x = inputs(key_dim=key_dim)
    x.g = -5 * torch.sigmoid(x.g.float())
    x.k = torch.nn.functional.normalize(x.k.float(), dim=-1).bfloat16()
    x.beta = x.beta.float().sigmoid()
    check(x, setting(gate=0, l2_norm=False, beta_sigmoid=False, scale=scale), device)


def test_without_rate_and_bias(device: str) -> None:
    check(replace(inputs(), A_log=None, dt_bias=None), setting(lower_bound=-1.5), device)


def test_parameters_in_bfloat16(device: str) -> None:
    x = inputs()
    assert x.A_log is not None and x.dt_bias is not None
    x.A_log, x.dt_bias = x.A_log.bfloat16(), x.dt_bias.bfloat16()
    check(x, setting(), device)


@pytest.mark.parametrize("logit", [-40.0, -9.0, 40.0])
def test_gates_at_their_ends(logit: float, device: str) -> None:
    """Open: nothing is forgotten. Closed, e^-5 a step: 64 steps are far beyond the range of a float."""
    x = inputs()
    x.g = torch.full_like(x.g, logit)
    check(x, setting(), device)


def test_a_gate_that_opens(device: str) -> None:
    """Some 2^-60 is left of what came before, in rows whose shift is up to 2^115: neither may take the other out of range."""
    x = inputs()
    x.g[:32], x.g[32:64] = -0.5, -40.0
    x = replace(x, dt_bias=None)
    got, truth = run(x, setting(), device), expected(x, setting())
    for name in ("Qd", "Kd"):
        a, b = getattr(got, name)[0, :, 32:].cpu().double(), getattr(truth, name)[0, :, 32:]
        assert (a - b).norm() <= LIMITS[name] * b.norm(), name


def test_half_the_channels_closed(device: str) -> None:
    x = inputs()
    x.g[..., ::2], x.g[..., 1::2] = -40.0, 40.0
    check(x, setting(), device)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("keys", ["one", "correlated"])
def test_t02_keys_that_hardly_differ(keys: str, scale: float, device: str) -> None:
    """beta near 1, and near 2, where terms of a series would grow like binomials."""
    x = inputs()
    x.k = x.k[:1].expand_as(x.k).contiguous() if keys == "one" else (x.k[:1] + 0.3 * x.k).contiguous()
    x.g, x.beta = torch.full_like(x.g, -12.0), torch.full_like(x.beta, 8.0)
    # At beta 2 the inverse of a repeated key does not decay: what rounding the keys to bfloat16 moves stays in it.
    check(x, setting(beta_scale=scale), device, A=1e-2 if scale == 1 else 1.5e-1)


def test_beta_of_zero(device: str) -> None:
    """Never exactly 0, for the gradient's sake; and negative ones."""
    x = inputs()
    x.k = torch.nn.functional.normalize(x.k.float(), dim=-1).bfloat16()
    x.beta = torch.linspace(-1, 1, x.beta.numel()).view_as(x.beta)
    x.beta[::7] = 0
    check(x, setting(beta_sigmoid=False), device)
    out = run(x, setting(beta_sigmoid=False), device)
    assert float(out.beta[0, 0, 7]) > 0


FREE = {"bounded": False, "gate": 2}


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(64, 37), (1, 16, 33, 50, 63)])
def test_softplus_in_ragged_chunks(key_dim: int, lengths: tuple[int, ...], device: str) -> None:
    check(inputs(lengths, key_dim=key_dim), setting(**FREE), device)


def test_softplus_of_shared_key_heads_and_of_float(device: str) -> None:
    x = inputs(qk_heads=2, heads=6)
    check(x, setting(**FREE), device)
    check(replace(x, g=x.g.float(), A_log=None, dt_bias=None, beta=x.beta.float()), setting(**FREE), device)


@pytest.mark.parametrize("logit", [-40.0, -9.0, -3.0, 2.0, 40.0, 3e4])
def test_softplus_at_its_ends(logit: float, device: str) -> None:
    """From a gate that forgets nothing to one in which a step is beyond the range of a float."""
    x = inputs()
    x.g = torch.full_like(x.g, logit)
    check(x, setting(**FREE), device)
    if logit > 0:
        x.g[::3], x.g[..., ::5] = -9.0, -7.0
        check(x, setting(**FREE), device)


@pytest.mark.parametrize("row", [3, 8, 16, 31, 32, 47, 48])
def test_a_step_that_forgets_everything(row: int, device: str) -> None:
    """Pairs behind it keep their precision, whatever block it is in; pairs across it are 0."""
    x = inputs((64,))
    x.g = (-0.03 * torch.rand(x.g.shape)).float()
    x.g[row] = -500.0
    got, truth = run(x, setting(bounded=False, gate=0), device), expected(x, setting(bounded=False, gate=0))
    assert all(error <= LIMITS[name] for name, error in errors(got, truth).items()), errors(got, truth)
    behind = (slice(None), slice(None), slice(row, None), slice(row, None))
    for name in ("P", "A"):
        a, b = getattr(got, name).cpu().double()[behind], getattr(truth, name)[behind]
        assert (a - b).norm() <= LIMITS[name] * b.norm(), name
        assert not getattr(got, name)[:, :, row:, :row].any(), name


def test_natural_decays_without_a_bound(device: str) -> None:
    x = inputs()
    x.g = -20 * torch.rand(x.g.shape) ** 4
    x.k = torch.nn.functional.normalize(x.k.float(), dim=-1).bfloat16()
    check(x, setting(bounded=False, gate=0, l2_norm=False, scale=1.0), device)


def test_t02_keys_that_hardly_differ_without_a_bound(device: str) -> None:
    x = inputs()
    x.k = x.k[:1].expand_as(x.k).contiguous()
    x.g, x.beta = torch.full_like(x.g, -12.0), torch.full_like(x.beta, 8.0)
    check(x, setting(**FREE), device, A=1e-2)


def test_t01_later_tokens_do_not_move_earlier_ones_without_a_bound(device: str) -> None:
    x = inputs((64,))
    y = inputs((64,))
    y.g[41:], y.k[41:], y.q[41:] = 3.0, 1.0, -1.0
    first, second = (run(t, setting(**FREE), device) for t in (x, y))
    for name in ("Qd", "Kd", "P", "A"):
        assert torch.equal(getattr(first, name)[:, :, :41], getattr(second, name)[:, :, :41]), name


def test_only_whole_chunks_and_blocks_below_the_diagonal_without_a_bound(device: str) -> None:
    x = inputs((64, 64))
    every = run(x, setting(**FREE), device)
    x.chunks = torch.full_like(x.chunks, -1)
    part = run(x, setting(**FREE), device, whole=False, full=True)
    block = torch.arange(CHUNK, device=device) // 16
    above = block[:, None] < block
    for name in Prepared._fields:
        a, b = getattr(part, name), getattr(every, name)
        if name in ("P", "A"):
            assert a[..., above].isnan().all() and not b[..., above].any(), name
            a, b = a[..., ~above], b[..., ~above]
        assert torch.equal(a, b), name


@pytest.mark.parametrize("poisoned", ["q", "k", "g", "beta"])
def test_nan_stays_seen_without_a_bound(poisoned: str, device: str) -> None:
    x = inputs()
    getattr(x, poisoned)[5] = float("nan")
    out = run(x, setting(**FREE), device)
    seen = {"q": "P", "k": "A", "g": "Kd", "beta": "beta"}[poisoned]
    assert getattr(out, seen)[0].isnan().any(), "hidden"
    assert not any(t[1].isnan().any() for t in out), "reached the other chunk"


@pytest.mark.parametrize("doubled", [False, True])
def test_what_it_prepares_is_the_operation(doubled: bool, device: str) -> None:
    """The scan over the chunks (docstring of scan_forward.py) in float64 against the token loop, one key in half the tokens."""
    tokens, s = 230, setting(beta_scale=2.0 if doubled else 1.0)
    x = inputs((tokens,))
    x.chunks = torch.tensor([[t, min(CHUNK, tokens - t)] for t in range(0, tokens, CHUNK)], dtype=torch.int32)
    x.k[::2] = x.k[:1]
    v = torch.randn(tokens, 2, 32, dtype=torch.float64)
    Qd, Kd, Kr, P, A, gamma, beta = (t.cpu().double() for t in run(x, s, device))
    S, o = torch.zeros(2, 128, 32, dtype=torch.float64), []
    for n, (start, count) in enumerate(x.chunks.tolist()):
        V = torch.zeros(2, CHUNK, 32, dtype=torch.float64)
        V[:, :count] = v[start : start + count].transpose(0, 1)
        U = A[n] @ (beta[n].unsqueeze(-1) * (V - Kd[n] @ S))
        o.append((Qd[n] @ S + P[n] @ U)[:, :count])
        S = gamma[n].unsqueeze(-1) * S + Kr[n].mT @ U
    assert x.A_log is not None and x.dt_bias is not None
    truth, state = recurrent_kda_reference(
        *(t[None].double() for t in (x.q, x.k)), v[None], *(t[None].double() for t in (x.g, x.beta)), A_log=x.A_log.double(),
        dt_bias=x.dt_bias.double(), scale=s.scale, lower_bound=-5.0, safe_gate=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=doubled, output_final_state=True,
    )  # fmt: skip
    for got, wanted in ((torch.cat(o, 1), truth[0].transpose(0, 1)), (S, state[0])):
        assert (got - wanted).norm() <= 6e-3 * wanted.norm(), float((got - wanted).norm() / wanted.norm())


def test_t01_later_tokens_do_not_move_earlier_rows(device: str) -> None:
    for at in (5, 20, 32, 50):
        x, y = inputs((64,)), inputs((64,))
        for name in ("q", "k", "g", "beta"):
            getattr(y, name)[at:] = -3 * getattr(y, name)[at:]
        a, b = run(x, setting(), device), run(y, setting(), device)
        for name in ("Qd", "Kd", "P", "A", "beta"):
            assert torch.equal(getattr(a, name)[:, :, :at], getattr(b, name)[:, :, :at]), (at, name)


def test_a_nan_does_not_reach_earlier_blocks_or_other_chunks(device: str) -> None:
    for name in ("q", "k", "g", "beta"):
        x = inputs()
        getattr(x, name)[40] = float("nan")
        out = run(x, setting(), device)
        assert all(torch.isfinite(t[1]).all() for t in out), name
        assert all(torch.isfinite(t[0, :, :32]).all() for t in (out.Qd, out.Kd, out.P, out.A, out.beta)), name
        hit = {"q": out.Qd, "k": out.Kd, "g": out.Kd, "beta": out.A}[name]
        assert hit[0, :, 40].isnan().any(), name


def test_strided_inputs_between_nan(device: str) -> None:
    x = inputs()
    tokens, heads, dim = x.g.shape
    packed = torch.full((tokens, heads, 3 * dim + 64), float("nan"), dtype=torch.bfloat16)
    y = replace(
        x,
        q=packed[:, :1, 8 : 8 + dim],
        k=packed[:, :1, 8 + dim : 8 + 2 * dim],
        g=packed[..., 16 + 2 * dim : 16 + 3 * dim],
    )
    for name in ("q", "k", "g"):
        getattr(y, name).copy_(getattr(x, name))
    assert all(torch.equal(a, b) for a, b in zip(run(x, setting(), device), run(y, setting(), device), strict=True))


@pytest.mark.parametrize("key_dim", [64, 128])
def test_no_barrier_is_missing(key_dim: int) -> None:
    """Warps and lanes in the other order: the same bits."""
    if reason := emulator.missing():
        pytest.skip(reason)
    x = inputs(key_dim=key_dim)
    with emulated():
        first = run(x, setting(), "cpu")
    with emulated(backwards=True):
        second = run(x, setting(), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_it_does_not_take() -> None:
    x, s = inputs(), setting()
    with emulated():
        for changed, given, word in (
            (replace(x, q=x.q.half()), s, "bfloat16"),
            (replace(x, beta=x.beta.double()), s, "beta"),
            (replace(x, q=x.q[..., :48], k=x.k[..., :48]), s, "64 or 128"),
            (replace(x, q=torch.zeros(101, 1, 132, dtype=torch.bfloat16)[..., 4:]), s, "16 bytes"),
        ):
            reason = stage.unsuitable(changed.q, changed.k, changed.g, changed.beta, given)
            assert reason is not None and word in reason
    reason = stage.unsuitable(x.q, x.k, x.g, x.beta, s)
    assert reason is not None and "cpu" in reason
