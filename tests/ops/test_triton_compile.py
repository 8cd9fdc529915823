"""Each Triton kernel compiles for sm_90 at K3's sizes, in the settings that its launch function chooses."""

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

from perilune.ops.attnres import triton_mix, triton_two_phase
from perilune.ops.kda import triton_decode, triton_verify
from perilune.ops.kda.arguments import check
from perilune.ops.kda.gpu.states import kda_gpu_states
from perilune.ops.kda.verify import Projections
from perilune.ops.triton import cross_entropy, norm, short_conv, situ_glu

HEADS, SIZE, WIDTH = 16, 128, 7168
SHARED_BYTES = 232_448  # that a program may have on sm_90
NUMBERS = (HEADS, SIZE, -5.0, SIZE**-0.5, 1e-5)


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def full(*shape: int) -> Tensor:
    return torch.empty(*shape)


def decode(step: Callable, batch: int, index: Tensor | None = None) -> None:
    channels = 3 * HEADS * SIZE
    step(
        half(batch, channels), full(channels, 4), half(batch, channels, 3), half(batch, HEADS, SIZE), full(HEADS),
        full(HEADS * SIZE), half(batch, HEADS), half(batch, HEADS, SIZE), full(SIZE), full(batch, HEADS, SIZE, SIZE), index,
        *NUMBERS,
    )  # fmt: skip


def verify(step: Callable, pending: bool) -> None:
    channels, batch, count = 3 * HEADS * SIZE, 2, 9

    def projections() -> Projections:
        return Projections(half(batch, count, channels), half(batch, count, HEADS, SIZE), half(batch, count, HEADS))

    step(
        projections(), half(batch, count, HEADS, SIZE), projections() if pending else None,
        torch.zeros(batch, dtype=torch.int32) if pending else None, full(channels, 4), full(HEADS), full(HEADS * SIZE),
        full(SIZE), half(batch, channels, 3), full(batch, HEADS, SIZE, SIZE), None, *NUMBERS,
    )  # fmt: skip


def depth(backward: bool) -> None:
    sources = [half(4, WIDTH) for _ in range(9)]
    if backward:
        triton_mix.backward(
            sources, half(4, WIDTH), half(4, WIDTH), half(4, WIDTH), full(4, 19), full(WIDTH), full(WIDTH), 1e-5
        )
    else:
        triton_mix.forward(sources, half(4, WIDTH), full(WIDTH), 1e-5, full(WIDTH), 1e-5, training=True)


def two_phases(backward: bool) -> None:
    bank, parts = [half(64, WIDTH)] * 8, full(64, 8, 24)
    if backward:
        triton_two_phase.backward(bank, half(24, 64, WIDTH), full(24, 64), parts, parts, full(64, 8), full(24, WIDTH))
    else:
        triton_two_phase.forward(bank, full(24, WIDTH), 1e-5)


def merged() -> None:
    triton_mix.forward([half(4, WIDTH)] * 2, None, full(WIDTH), 1e-5, None, 0.0, given=full(4))


def convolution(backward: bool) -> None:
    x, weight, window = half(2, 64, 512), full(512, 4), half(2, 512, 3)
    if backward:
        short_conv.backward(x, weight, window, None, x)
    else:
        short_conv.forward(x, weight, window, None)


def rows(backward: bool) -> None:
    x, weight = half(64, 128), full(128)
    if backward:
        norm.backward(x, x, weight, full(64), x, 1 / 128)
        norm.backward(half(4, WIDTH), None, full(WIDTH), full(4), half(4, WIDTH), 1 / WIDTH)
    else:
        norm.forward(x, x, weight, 1e-5, 1 / 128, training=True)


def units(backward: bool) -> None:
    x = half(8, 6144)
    gate, up = x[:, :3072], x[:, 3072:]
    for caps in ((4.0, 25.0), (None, None)):
        if backward:
            situ_glu.backward(gate, up, gate, *caps)
        else:
            situ_glu.forward(gate, up, *caps)


def losses() -> None:
    target = torch.zeros(4, dtype=torch.int64)
    cross_entropy.rows(half(4, 163_840), target, -100, True, None)
    cross_entropy.rows(half(4, 16_384), target, -100, False, full(4))


CALLS: dict[str, tuple[Callable[[], None], int]] = {  # a call, and the bytes that it may spill
    "decode, a few heads": (lambda: decode(triton_decode.decode_step, 1), 0),
    "decode, many heads": (lambda: decode(triton_decode.decode_step, 16), 64),
    "decode, pool": (lambda: decode(triton_decode.decode_step, 16, torch.zeros(16, dtype=torch.int64)), 64),
    "verify": (lambda: verify(triton_verify.verify_step, True), 0),
    "verify, first window": (lambda: verify(triton_verify.verify_step, False), 0),
    "read": (lambda: depth(False), 0),
    "read, backward": (lambda: depth(True), 256),
    "two phases": (lambda: two_phases(False), 0),
    "two phases, backward": (lambda: two_phases(True), 0),
    "merge": (merged, 0),
    "convolution": (lambda: convolution(False), 0),
    "convolution, backward": (lambda: convolution(True), 64),
    "norms": (lambda: rows(False), 0),
    "norms, backward": (lambda: rows(True), 0),
    "cross-entropy": (losses, 0),
    "gated units": (lambda: units(False), 0),
    "gated units, backward": (lambda: units(True), 0),
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
        assert result.registers * 32 * result.warps <= 65536, result


def test_the_widest_rows_fit_into_shared_memory() -> None:
    """A loop's stages hold a row each, of every tensor that it reads: at 16384 numbers in float32 not many fit."""
    rows = [full(3, 16_384) for _ in range(3)]
    norm = full(16_384)
    launches = compiled(lambda: triton_mix.forward(rows, rows[0], norm, 1e-5, norm, 1e-5, training=True))
    launches += compiled(lambda: triton_mix.backward(rows, rows[0], rows[1], rows[2], full(3, 7), norm, norm, 1e-5))
    assert len(launches) == 2 and all(one.shared <= SHARED_BYTES for one in launches), launches


@pytest.mark.parametrize("dim", [64, 128])
def test_states_that_leave_the_scan_fit_beside_its_stages(dim: int) -> None:
    sequence = [half(1, 256, 2, dim) for _ in range(4)] + [half(1, 256, 2)]
    options = {"lower_bound": -5.0, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "A_log": full(2)}
    args = check(*sequence, output_final_state=True, **options)
    launches = {one.name: one for one in compiled(lambda: kda_gpu_states(args, [(0, 64), (0, 192)]))}
    assert launches["scan_forward_kernel"].shared <= SHARED_BYTES, launches
