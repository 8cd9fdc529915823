"""The CUDA kernel of the balancer's histogram: it compiles for sm_90a, and emulated on the CPU it counts as torch does."""

from __future__ import annotations

import pytest
import torch

from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator, nvrtc
from perilune.ops.moe import router
from perilune.ops.moe.cuda import histogram
from perilune.ops.moe.quantile import QuantileHistogram, select


def test_compiles_without_spills() -> None:
    if reason := nvrtc.missing():
        pytest.skip(reason)
    kernel = histogram._kernel(1000)
    headers = {header.name: header.read_text() for header in kernel._headers()}
    _, log = nvrtc.compiled(kernel.source, headers, kernel.options((9, 0)))
    assert "0 bytes spill stores" in log, log


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "bins"), [(70, 40, 100), (1, 3, 1000), (700, 9, 7), (0, 8, 10)])
def test_counts_as_torch_does(tokens: int, experts: int, bins: int, backwards: bool) -> None:
    """Several slabs of tokens, a last group of fewer experts, padding, and tokens whose scores are no numbers."""
    if reason := emulator.missing():
        pytest.skip(reason)
    torch.manual_seed(tokens)
    bias_E = torch.randn(experts)
    routing = router.route(torch.randn(tokens, experts), bias_E, 2)
    routing.scores_NE[tokens // 2 : tokens // 2 + 1, 0] = float("nan")
    valid_N = torch.rand(tokens) < 0.5
    for valid in (None, valid_N):
        counts = []
        for implementation in ("torch", "cuda"):
            balancer = QuantileHistogram(experts, 2, bins=bins)
            with force(implementation), emulated(backwards):
                assert select(routing.scores_NE, bins).implementation == implementation
                for _ in range(2):
                    balancer.observe(routing.scores_NE, routing.cutoff_N, valid, routing.counts(), bias_E)
            counts.append(balancer.count_EB)
        assert torch.equal(*counts)
        assert int(counts[0].sum()) == 2 * experts * (tokens if valid is None else int(valid_N.sum()))


def test_what_does_not_fit_goes_elsewhere() -> None:
    scores_NE = torch.rand(4, 8)
    with force("cuda"):
        assert "not on cpu" in select(scores_NE, 1000).reason
        with emulated():
            assert "100000 bins" in select(scores_NE, 100_000).reason
            assert "float32" in select(scores_NE.double(), 1000).reason
    assert select(scores_NE, 1000).implementation != "cuda"
