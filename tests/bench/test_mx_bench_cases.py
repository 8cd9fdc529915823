"""Both sides of each MX bench case compute the same thing."""

from __future__ import annotations

import pytest
import torch

from perilune.bench import kernels
from perilune.bench.mx import DTYPES, PAIRS, cases

pytest.importorskip("torchao", reason="torchao is in the dev extra")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("name", PAIRS)
def test_ours_equals_the_peer(name: str, block_format: str, dtype: str) -> None:
    x = torch.randn(16, 96).to(DTYPES[dtype])
    found = [side() for side in PAIRS[name](x, block_format)]
    ours, theirs = (side if isinstance(side, tuple) else (side,) for side in found)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_rows_count_their_bytes() -> None:
    assert "mx" in kernels.OPS
    found = {case.name: case for case in cases("cpu")}
    assert len(found) == 12
    n = 2048 * 2048
    assert found["mx_quantize_mxfp4_bfloat16"].bytes == n * (2 + 17 / 32)
    assert found["mx_dequantize_mxfp8_float32"].bytes == n * (4 + 33 / 32)
    assert found["mx_fake_quant_mxfp4_float32"].bytes == n * 8
