"""The CUDA kernels of absorbed attention, emulated on the CPU, against plain torch in float64: lengths, pages, several tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.mla import attend_cached, attend_latent, decode, device, latent
from perilune.ops.mla.cuda.merge import merge

pytestmark = [
    pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing())),
    pytest.mark.usefixtures("poisoned_memory"),
]

SCALE = 0.05
CASES = [  # B, T, H, lengths, room, runs
    (1, 1, 20, (300,), 320, 1),  # an odd number of blocks, the last one cut
    (4, 1, 70, (0, 64, 200, 129), 256, 3),  # two tiles; runs of 3 blocks: 0 | 64 | 200-, -200 | 129-, -129
    (
        2,
        3,
        24,
        (131, 3),
        192,
        7,
    ),  # queries that see less than others across the border of two blocks; runs without blocks
]


def operands(case: tuple) -> dict[str, Tensor]:
    """Inputs of `attend_cached` in bfloat16; the cache is NaN beyond each length."""
    batch, tokens, heads, lengths, room, _ = case
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).bfloat16()

    cache = randn(batch, room, 576)
    for row, length in enumerate(lengths):
        cache[row, length:] = torch.nan
    query = randn(batch, tokens, heads, 24)
    return {
        "q_nope_BTHn": query[..., :16], "q_rope_BTHr": randn(batch, tokens, heads, 72)[..., 8:], "cache_BSC": cache,
        "w_uk_HnL": randn(heads, 16, 512) / 4, "w_uv_HvL": randn(heads, 8, 512) / 23,
        "length_B": torch.tensor(lengths, dtype=torch.int32),
    }  # fmt: skip


def truth(inputs: dict[str, Tensor]) -> Tensor:
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    with force("torch"):
        return attend_cached(**wide, scale=SCALE)


def paged(inputs: dict[str, Tensor], page: int) -> dict[str, Tensor]:
    """The same caches as shuffled pages of a pool, amid NaN."""
    batch, room, width = inputs["cache_BSC"].shape
    count = batch * room // page
    number = torch.randperm(2 * count, generator=torch.Generator().manual_seed(1))[:count]
    pages = torch.full((2 * count, page + 64, width), torch.nan).bfloat16()[:, 64:]
    pages[number] = inputs["cache_BSC"].reshape(count, page, width)
    return inputs | {"cache_BSC": pages, "table_BP": number.view(batch, -1).int()}


def run(inputs: dict[str, Tensor], backwards: bool = False) -> Tensor:
    with force("cuda"), emulated(backwards):
        chosen = decode.select(inputs["q_nope_BTHn"], inputs["cache_BSC"], inputs["w_uk_HnL"])
        assert chosen.implementation == "cuda", chosen.reason
        return attend_cached(**inputs, scale=SCALE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lengths_pages_and_both_orders(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "runs_of", lambda *_: case[-1])
    inputs = operands(case)
    got, right = run(inputs), truth(inputs)
    with force("torch"):
        plain = attend_cached(**inputs, scale=SCALE)
    error, theirs = (float((x.double() - right).norm() / right.norm()) for x in (got, plain))
    assert got.isfinite().all() and error < 6e-3 and error < 1.2 * theirs
    for page in (64, 128 if case[4] % 128 == 0 else case[4]):
        other = run(paged(inputs, page), backwards=page == 64)
        assert torch.equal(other, got), "pages hold the same rows; the order of threads is free"


def test_a_cut_cache_of_one_length() -> None:
    inputs = operands((1, 2, 24, (130,), 130, 1))
    parts = inputs["cache_BSC"].split((512, 64), -1)
    arguments = [inputs[n] for n in ("q_nope_BTHn", "q_rope_BTHr")], [inputs[n] for n in ("w_uk_HnL", "w_uv_HvL")]
    with force("cuda"), emulated():
        assert latent.select(inputs["q_nope_BTHn"], parts[0], inputs["w_uk_HnL"]).implementation == "cuda"
        got = attend_latent(*arguments[0], *parts, *arguments[1], SCALE, past=128)
    assert float((got.double() - truth(inputs)).norm() / truth(inputs).norm()) < 6e-3


def test_nan_in_a_seen_row_shows() -> None:
    inputs = operands(CASES[0])
    inputs["cache_BSC"][0, 299, 3] = torch.nan
    assert run(inputs).isnan().all()


def test_scores_that_grow_by_far_and_by_little() -> None:
    """What weights are relative to follows the scores; from block to block they grow by 3, then by 300."""
    inputs = operands((1, 1, 24, (64 * 7,), 64 * 7, 1))
    for name in ("q_nope_BTHn", "q_rope_BTHr"):
        inputs[name][:] = 1.0
    inputs["cache_BSC"][..., 512:] += torch.tensor([0, 3, 6, 9, 300, 303, 280]).repeat_interleave(64)[:, None] / (
        64 * SCALE
    )
    got, right = run(inputs), truth(inputs)
    assert float((got.double() - right).norm() / right.norm()) < 6e-3


@pytest.mark.parametrize("runs", [7, 90])
def test_merge_of_runs(runs: int) -> None:
    """Few and many parts: of each run the sequence that it began in, and the one that it ended in."""
    lengths = (64 * 60, 10, 64 * 119 + 1)  # 60, 1 and 120 blocks
    count, run = 3, -(-181 // runs)
    draw = torch.Generator().manual_seed(0)
    sums, logs = torch.randn(runs, 2, count, 512, generator=draw), 4 * torch.randn(runs, 2, count, generator=draw)
    logs[2, 0, 1] = -torch.inf  # a row that sees nothing of a part
    expected = torch.full((3, count, 512), 7.0, dtype=torch.float64)
    start = 0
    for row, length in enumerate(lengths):
        first, last = start // run, (start + -(-length // 64) - 1) // run
        if first < last:
            which = [(first, int(start > first * run)), *((r, 0) for r in range(first + 1, last + 1))]
            weight = torch.softmax(torch.stack([logs[w] for w in which]).double() * 0.6931471805599453, 0)
            expected[row] = sum(w[:, None] * sums[at].double() for w, at in zip(weight, which, strict=True))
        start += -(-length // 64)
    for backwards in (False, True):
        out = torch.full((3, count, 512), 7.0).bfloat16()
        with emulated(backwards):
            merge(sums, logs, torch.tensor(lengths, dtype=torch.int32), out, 8000)
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)


def test_what_the_kernels_do_not_take_is_said() -> None:
    q, cache, weight = torch.zeros(1, 1, 20, 4), torch.zeros(1, 8, 576), torch.zeros(20, 4, 512)
    half = q.bfloat16(), cache.bfloat16(), weight.bfloat16()
    with force("cuda"):
        assert "not on cpu" in decode.select(*half).reason
        with emulated():
            assert "not float32" in decode.select(q, cache, weight).reason
            assert "not 256" in decode.select(*half[:2], weight[..., :256]).reason
            assert "gradient" in decode.select(half[0].requires_grad_(), *half[1:]).reason
            parts, shared = half[1].split((512, 64), -1), half[0].new_zeros(1, 1, 20, 64)
            assert "0 or 64" in str(device.cuda.unsuitable(shared, parts[0], parts[1][..., :32], 1.0))
            assert "positive" in str(device.cuda.unsuitable(shared, *parts, -1.0))
            assert "16 bytes" in str(device.cuda.unsuitable(shared, half[1][..., 1:513], parts[1], 1.0))
            assert device.cuda.unsuitable(shared, *parts, 1.0) is None
