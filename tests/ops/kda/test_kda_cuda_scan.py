"""The serial kernels of the forward pass in CUDA against their definition in float64: emulated, on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.cuda import emulated, emulator
from perilune.ops.kda.cuda import scan as stage
from perilune.ops.kda.cuda import scan_backward, summary
from perilune.ops.kda.gpu.forward import Prepared, state_strides
from perilune.ops.kda.gpu.plan import CHUNK, Plan, plan

NAN = float("nan")
LIMIT = 4.5e-3  # of states, errors and writes rounded to bfloat16 on the way
EVERY = [(128, 128, 128), (128, 128, 64), (64, 64, 64), (64, 128, 128)]  # K, V, value channels of a block


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu" and (reason := emulator.missing()):
        pytest.skip(reason)
    with emulated():
        yield request.param


class Case(NamedTuple):
    """What `prepare` found, as random numbers; v in a tensor with NaN around it; entry states `[N, H, V, K]`."""

    p: Plan
    x: Prepared
    v: Tensor
    state: Tensor
    offsets: tuple[int, ...]


def case(
    offsets: tuple[int, ...], device: str, heads: int = 2, key_dim: int = 128, value_dim: int = 128, width: int = 128,
    segment: int = 1000,
) -> Case:  # fmt: skip
    """`segment`: its chunks."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    p = plan(offsets, segment, width, torch.device(device))
    chunks = p.chunk_count
    wide = ((normal(chunks, heads, CHUNK, key_dim) / 10).bfloat16() for _ in range(3))
    square = [(normal(chunks, heads, CHUNK, CHUNK) / 10).tril().bfloat16() for _ in range(2)]
    square[1].diagonal(dim1=-2, dim2=-1).fill_(1)
    block = torch.arange(CHUNK) // 16
    for x in square:
        x[..., block[:, None] < block] = NAN  # which `prepare` need not have written
    gamma = torch.rand(chunks, heads, key_dim, generator=generator)
    beta = torch.rand(chunks, heads, CHUNK, generator=generator)
    x = Prepared(*(t.to(device) for t in (*wide, *square, gamma, beta)))
    around = torch.full((offsets[-1], heads, value_dim + 16), NAN, dtype=torch.bfloat16)
    around[..., 8:-8] = normal(offsets[-1], heads, value_dim)
    state = normal(len(offsets) - 1, heads, value_dim, key_dim).to(device)
    return Case(p, x, around.to(device)[..., 8:-8], state, offsets)


class Scanned(NamedTuple):
    o: Tensor
    final: Tensor
    U: Tensor
    S: Tensor


def expected(c: Case) -> Scanned:
    """The docstring of scan_forward.py, in float64."""
    Qd, Kd, Kr, P, A, gamma, beta = (t.cpu().double() for t in c.x)
    P, A = P.tril(), A.tril()
    v = c.v.cpu().double()
    o, final, U, S, chunk = torch.zeros_like(v), [], [], [], 0
    for n, (begin, end) in enumerate(pairwise(c.offsets)):
        state = c.state[n].cpu().double().mT
        for start in range(begin, end, CHUNK):
            rows = slice(start, min(start + CHUNK, end))
            V = torch.zeros(v.shape[1], CHUNK, v.shape[2], dtype=torch.float64)
            V[:, : rows.stop - start] = v[rows].transpose(0, 1)
            S.append(state.mT)
            U.append(A[chunk] @ (beta[chunk].unsqueeze(-1) * (V - Kd[chunk] @ state)))
            o[rows] = (Qd[chunk] @ state + P[chunk] @ U[-1])[:, : rows.stop - start].transpose(0, 1)
            state = gamma[chunk].unsqueeze(-1) * state + Kr[chunk].mT @ U[-1]
            chunk += 1
        final.append(state.mT)
    return Scanned(o, torch.stack(final), torch.stack(U), torch.stack(S))


def scan(
    c: Case, keep: bool = True, entry: Tensor | None = None, v_first: bool = True, slots: Tensor | None = None
) -> tuple[Scanned, Tensor]:
    """Everything that the kernel writes, and the exported states; NaN where it wrote nothing."""
    (chunks, heads, _, key_dim), value_dim = c.x.Kd.shape, c.v.shape[-1]
    low = {"dtype": torch.bfloat16, "device": c.v.device}
    o, U = torch.full(c.v.shape, NAN, **low), torch.full((chunks, heads, CHUNK, value_dim), NAN, **low)
    S = torch.full((chunks, heads, value_dim, key_dim), NAN, **low)
    state = c.state if entry is None else entry
    state = state if v_first else state.mT.contiguous()
    final = torch.full_like(c.state if v_first else c.state.mT, NAN)
    exported = torch.full((0 if slots is None else int(slots.max()) + 1, *c.state.shape[1:]), NAN, device=c.v.device)
    assert stage.unsuitable(c.v, key_dim, o.dtype) is None
    stage.run(
        c.v, c.x, c.p, state, state_strides(state, v_first), final, state_strides(final, v_first), o,
        U if keep else None, S if keep else None, slots, exported if slots is not None else None,
    )  # fmt: skip
    return Scanned(o, final if v_first else final.mT, U, S), exported


def check(got: NamedTuple, truth: NamedTuple, *names: str) -> None:
    errors = {
        n: float((getattr(got, n).cpu().double() - getattr(truth, n)).norm() / getattr(truth, n).norm()) for n in names
    }
    assert all(error <= LIMIT for error in errors.values()), errors


def only_on_a_gpu(device: str, *sizes: int) -> None:
    """Each is a kernel to compile; the emulated whole function has heads of 64 (interpreted_chunk.py)."""
    if device == "cpu" and sizes != EVERY[0]:
        pytest.skip("on a GPU only")


@pytest.mark.parametrize(("key_dim", "value_dim", "width"), EVERY)
def test_ragged_sequences(key_dim: int, value_dim: int, width: int, device: str) -> None:
    """Shorter than a chunk, empty, and longer; states in and out in either layout; the same bits with and without keeping."""
    only_on_a_gpu(device, key_dim, value_dim, width)
    c = case((0, 30, 30, 230), device, key_dim=key_dim, value_dim=value_dim, width=width)
    truth = expected(c)
    kept, _ = scan(c)
    check(kept, truth, *Scanned._fields)
    plain, _ = scan(c, keep=False, v_first=False)
    assert torch.equal(plain.o, kept.o) and torch.equal(plain.final, kept.final)


def blank(c: Case, key_dim: int = 128) -> Tensor:
    """A state a unit, NaN."""
    return torch.full((c.p.unit_count, *c.state.shape[1:3], key_dim), NAN, device=c.v.device)


def test_segments_from_their_entry_states(device: str) -> None:
    """The kernel and its summaries: folded in float64 they give the state at every cut, from which the segments run."""
    c = case((0, 450), device, segment=2)
    units, M, N = c.p.unit_count, blank(c), blank(c)
    assert units == 4
    summary.run(c.v, c.x, c.p, c.state, state_strides(c.state, True), M, N)
    assert M[0].isnan().all() and M[-1].isnan().all() and N[-1].isnan().all(), "nobody needs these"
    entry = [c.state[0].double(), N[0].double()]
    for unit in range(1, units - 1):
        entry.append(entry[-1] @ M[unit].double() + N[unit].double())
    got, _ = scan(c, entry=torch.stack(entry).float())
    check(got, expected(c), *Scanned._fields)


def test_states_of_chosen_chunks_leave(device: str) -> None:
    c = case((0, 200, 300), device)
    slots = torch.tensor([-1, 1, -1, 2, 0, -1], dtype=torch.int32, device=device)
    got, exported = scan(c, keep=False, slots=slots)
    truth = expected(c)
    for place, chunk in ((1, 2), (0, 5)):  # behind a chunk is what enters the next one
        assert (exported[place].cpu() - truth.S[chunk]).norm() <= LIMIT * truth.S[chunk].norm()
    assert torch.equal(exported[2], got.final[0])


def test_t01_later_values_do_not_move_earlier_outputs(device: str) -> None:
    c = case((0, 200), device)
    later = c._replace(v=c.v.clone())
    later.v[100:] *= -3
    (a, _), (b, _) = scan(c), scan(later)
    assert torch.equal(a.o[:100], b.o[:100]) and not torch.equal(a.o[100:], b.o[100:])


class Cotangents(NamedTuple):
    E: Tensor
    dS: Tensor
    entering: Tensor


def expected_cotangents(c: Case) -> Cotangents:
    """The docstring of scan_backward.py, in float64; `c.v` stands for the cotangent of o, `c.state` of the final state."""
    Qd, Kd, Kr, P, A, gamma, beta = (t.cpu().double() for t in c.x)
    P, A = P.tril(), A.tril()
    do = c.v.cpu().double()
    E, dS, entering, base = torch.zeros_like(do), [None] * len(Qd), [], 0
    for n, (begin, end) in enumerate(pairwise(c.offsets)):
        state, starts = c.state[n].cpu().double().mT, range(begin, end, CHUNK)
        for chunk, start in reversed(list(enumerate(starts, base))):
            rows = slice(start, min(start + CHUNK, end))
            dO = torch.zeros(do.shape[1], CHUNK, do.shape[2], dtype=torch.float64)
            dO[:, : rows.stop - start] = do[rows].transpose(0, 1)
            dS[chunk] = state.mT
            e = beta[chunk].unsqueeze(-1) * (A[chunk].mT @ (P[chunk].mT @ dO + Kr[chunk] @ state))
            E[rows] = e[:, : rows.stop - start].transpose(0, 1)
            state = gamma[chunk].unsqueeze(-1) * state + Qd[chunk].mT @ dO - Kd[chunk].mT @ e
        base += len(starts)
        entering.append(state.mT)
    return Cotangents(E, torch.stack(dS), torch.stack(entering))


def scan_back(c: Case, leaving: Tensor | None = None, v_first: bool = True) -> Cotangents:
    """Everything that the kernel writes; NaN where it wrote nothing."""
    E = torch.full(c.v.shape, NAN, dtype=torch.bfloat16, device=c.v.device)
    dS = torch.full((c.p.chunk_count, *c.state.shape[1:]), NAN, dtype=torch.bfloat16, device=c.v.device)
    state = c.state if leaving is None else leaving
    state = state if v_first else state.mT.contiguous()
    entering = torch.full_like(c.state if v_first else c.state.mT, NAN)
    strides = state_strides(state, v_first), state_strides(entering, v_first)
    scan_backward.run(c.v, c.x, c.p, state, strides[0], c.p.split, entering, strides[1], E, dS)
    return Cotangents(E, dS, entering if v_first else entering.mT)


@pytest.mark.parametrize(("key_dim", "value_dim", "width"), EVERY)
def test_cotangents_of_ragged_sequences(key_dim: int, value_dim: int, width: int, device: str) -> None:
    only_on_a_gpu(device, key_dim, value_dim, width)
    c = case((0, 30, 30, 230), device, key_dim=key_dim, value_dim=value_dim, width=width)
    check(scan_back(c), expected_cotangents(c), *Cotangents._fields)
    assert torch.equal(scan_back(c, v_first=False).entering, scan_back(c).entering)


def test_what_is_forgotten_at_once_is_rounded_once(device: str) -> None:
    """With A = I and no state E is beta P^T dO, exact but for its own rounding: beta's gradient lives on it there."""
    c = case((0, 100), device)
    unit = torch.eye(CHUNK, dtype=torch.bfloat16, device=device).expand_as(c.x.A).contiguous()
    x = c.x._replace(A=unit, P=c.x.P.diagonal(dim1=-2, dim2=-1).diag_embed(), Kr=torch.zeros_like(c.x.Kr))
    E = scan_back(c._replace(x=x)).E
    P, beta = (t.transpose(1, 2).flatten(0, 1)[:100, :, None] for t in (c.x.P.diagonal(dim1=-2, dim2=-1), c.x.beta))
    assert torch.equal(E, (beta * (P.float() * c.v.float())).bfloat16())


def test_cotangents_of_segments(device: str) -> None:
    c = case((0, 450), device, segment=2)
    M, N, forward = blank(c), blank(c), blank(c)
    summary.run(c.v, c.x, c.p, None, (0,) * 4, M, forward)
    scan_backward.run(c.v, c.x, c.p, c.state, state_strides(c.state, True), False, N, (0,) * 4, None, None)
    assert N[0].isnan().all(), "it begins the sequence"
    leaving = [c.state[0].double(), N[-1].double()]
    for unit in reversed(range(1, c.p.unit_count - 1)):
        leaving.append(leaving[-1] @ M[unit].double().mT + N[unit].double())
    check(scan_back(c, torch.stack(leaving[::-1]).float()), expected_cotangents(c), *Cotangents._fields)


def test_no_barrier_is_missing() -> None:
    """Warps and lanes in the other order: the same bits."""
    if reason := emulator.missing():
        pytest.skip(reason)
    c = case((0, 400), "cpu", heads=1)
    with emulated():
        first = *scan(c)[0], *scan_back(c)
    with emulated(backwards=True):
        second = *scan(c)[0], *scan_back(c)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_it_does_not_take() -> None:
    c = case((0, 64), "cpu")
    with emulated():
        for rows, key_dim, dtype, word in (
            (c.v.float(), 128, torch.bfloat16, "float32"),
            (c.v, 128, torch.float16, "float16"),
            (c.v, 96, torch.bfloat16, "64 or 128"),
            (c.v[..., 1:65], 128, torch.bfloat16, "16 bytes"),
        ):
            reason = stage.unsuitable(rows, key_dim, dtype)
            assert reason is not None and word in reason
    assert "cpu" in str(stage.unsuitable(c.v, 128, torch.bfloat16))
