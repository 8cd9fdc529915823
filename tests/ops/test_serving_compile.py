"""The kernels of MLA, MX formats and small expert batches compile for sm_90 at K3's sizes, in the settings they are launched with."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.ops.triton.available import missing

if reason := missing():
    pytest.skip(reason, allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from compiled_for_hopper import compiled

from perilune.ops.mla import triton_attend, triton_attend_backward, triton_decode
from perilune.ops.moe import triton_decode as moe_decode
from perilune.ops.moe.triton.plan import RowPlan
from perilune.ops.mx import DeviceWeight, triton_blocks, triton_experts
from perilune.ops.mx.element import E2M1, E4M3
from perilune.ops.packed_conv import Chunks
from perilune.ops.triton import packed_conv as triton_conv

WIDTH, HIDDEN, EXPERTS = 3584, 3072, 4


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def integers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def latent(heads: int, pages: bool = False) -> None:
    cache = half(8, 64, 576) if pages else half(2, 8192, 576)
    triton_decode.context(
        half(2, heads, 512), half(2, 1, heads, 64), cache[..., :512], cache[..., 512:], 0.07, integers(2),
        integers(2, 128) if pages else None, splits=8,
    )  # fmt: skip


def attention(backward: bool, packed: bool) -> None:
    tokens, heads = 8192, 16
    q, k, v = half(1, tokens, heads, 192), half(1, tokens, heads, 192), half(1, tokens, heads, 128)
    layout = triton_attend.Layout(integers(tokens), integers(tokens)) if packed else None
    if backward:
        out, logs = torch.empty(1, tokens, heads, 128), torch.empty(1, heads, tokens)
        triton_attend_backward.backward(q, k, v, out, logs, out, 0.07, layout, 0)
    else:
        triton_attend.forward(q, k, v, 0.07, layout, 0, torch.float32, training=True)


def chunks(keys: int, values: int) -> None:
    token, (tokens, heads) = integers(2048), (2048, 16)
    operands = half(1, tokens, heads, keys), half(1, 8192, heads, keys), half(1, 8192, heads, values)
    triton_attend.forward_chunks(*operands, 0.07, token, token, half(1, tokens, heads, values))


def convolution() -> None:
    where = Chunks.of((300, 5), [(0, 300), (1, 5)], lambda tensor: tensor)
    operands = half(305, WIDTH), torch.zeros(WIDTH, 4), half(2, WIDTH, 3)
    triton_conv.convolve(*operands, where)
    triton_conv.windows(operands[0], operands[2], where)


def packed(rows: int, columns: int) -> DeviceWeight:
    shape = EXPERTS, columns // 128, rows
    return DeviceWeight(torch.zeros(*shape, 32, dtype=torch.int16), integers(*shape), columns)


def experts(tile: triton_experts.Tiling) -> None:
    plan = RowPlan(
        tile.rows, integers(EXPERTS), integers(EXPERTS + 1), integers(8), integers(8 * tile.rows), integers(64), 16
    )
    triton_experts.hidden(half(4, WIDTH), packed(HIDDEN, WIDTH), packed(HIDDEN, WIDTH), plan, tile, (4.0, 25.0))
    triton_experts.weighted(half(plan.rows, HIDDEN), packed(WIDTH, HIDDEN), torch.zeros(4, 16), plan, tile)


def few() -> None:
    w1, w3, w2 = half(EXPERTS, HIDDEN, WIDTH), half(EXPERTS, HIDDEN, WIDTH), half(EXPERTS, WIDTH, HIDDEN)
    index = torch.zeros(2, 3, dtype=torch.int64)
    moe_decode.experts(half(2, WIDTH), index, torch.zeros(2, 3), w1, w3, w2, (4.0, 25.0))


def mx_blocks() -> None:
    x, scales = half(64, WIDTH), torch.zeros(64, WIDTH // 32, dtype=torch.uint8)
    for element in (E2M1, E4M3):
        codes = torch.zeros(64, WIDTH * element.bits // 8, dtype=torch.uint8)
        triton_blocks.round_rows(x, WIDTH, x, WIDTH, element, "floor")
        triton_blocks.encode_rows(x, WIDTH, codes, scales, WIDTH, element, "floor")
        triton_blocks.decode_rows(codes, scales, x, element)


CALLS: dict[str, tuple[Callable[[], None], int]] = {  # a call, and the bytes that it may spill
    "latent, 12 heads": (lambda: latent(12), 0),
    "latent, 24 heads": (lambda: latent(24), 0),
    "latent, 96 heads": (lambda: latent(96), 0),
    "latent, pages": (lambda: latent(48, pages=True), 0),
    "attention": (lambda: attention(False, False), 0),
    "attention, documents": (lambda: attention(False, True), 0),
    "attention, backward": (lambda: attention(True, False), 128),
    "attention, chunks": (lambda: chunks(96, 64), 0),
    "attention, wide chunks": (lambda: chunks(192, 128), 0),
    "convolution of chunks": (convolution, 0),
    "packed experts, decode": (lambda: experts(triton_experts.FEW), 0),
    "packed experts, prefill": (lambda: experts(triton_experts.MANY), 0),
    "few tokens": (few, 0),
    "MX blocks": (mx_blocks, 0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="Triton compiles on Linux with a C compiler"
)
def test_compiles(name: str) -> None:
    call, allowed = CALLS[name]
    results = compiled(call)
    assert results
    for result in results:
        assert result.spilled <= allowed, result
        assert result.registers * 32 * result.warps <= 65536 and result.shared <= 227 * 1024, result
