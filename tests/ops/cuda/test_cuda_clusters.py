"""The emulator: clusters of blocks, tiles that the copying unit brings to several of them, a left operand across its rows."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from perilune.ops.cuda import Kernel, emulated, emulator, nvrtc
from perilune.ops.cuda.emulator import EmulatorError
from perilune.ops.cuda.tile_map import PLACE, WORDS, tile_map

if reason := emulator.missing():
    pytest.skip(reason, allow_module_level=True)

PARAMETERS = "PP" + "q" * 12  # before the map
# Each block of a pair copies half of the rows of each tile, for both; `empty` counts both blocks' readers.
SOURCE = """#include "device.h"
KERNEL_OF_CLUSTERS(64, 1, 2) f(const float* shape, float* out, i64 a, i64 b, i64 c, i64 d, i64 e, i64 g, i64 h, i64 i, i64 j, i64 k, i64 l, i64 m, TILE_MAP x) {
    SHARED(memory);
    u64* full = (u64*)(memory + 8192), *empty = full + 1;
    const int rank = cluster_rank(), thread = threadIdx.x, turns = (int)shape[0];
    if (thread == 0) { phase_begin(full, 1); phase_begin(empty, EMPTIED); }
    cluster_sync();
    if (thread == 32)
        for (int n = 0; n < turns; n++) {
            if (n) phase_wait(empty, (n & 1) ^ 1);
            phase_arrive_expecting(full, 8192);
            copy_tile(memory + rank * 4096, x, 64 * (n % 2), 32 * rank + 8 * n, n / 2, full, 3);
        }
    if (thread < 32)
        for (int n = 0; n < turns; n++) {
            phase_wait(full, n & 1);
            for (int at = thread; at < 4096; at += 32) {
                const int row = at / 64, channel = at % 64;
                out[((i64)blockIdx.x * turns + n) * 4096 + at] = to_float(*(bf16*)(memory + in_block(row, channel / 8) + channel % 8 * 2));
            }
            sync_warp();
            if (thread == 0) for (int r = 0; r < 2; r++) phase_arrive_at(empty, r);
        }
    sync_warp();
    cluster_sync();
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def launch(folder: Path, x: Tensor, turns: int, backwards: bool, emptied: int = 2, blocks: int = 4) -> Tensor:
    """What each block saw at each turn, `[blocks, turns, 64, 64]`."""
    (folder / "probe.cu").write_text(SOURCE)
    out = torch.full((blocks, turns, 64, 64), torch.nan)
    kernel = Kernel(
        folder / "probe.cu",
        "f",
        PARAMETERS + "q" * WORDS,
        threads=64,
        shared_bytes=8192 + 16,
        defines={"EMPTIED": emptied},
    )
    with emulated(backwards):
        kernel.launch((blocks,), torch.tensor([float(turns)]), out, *[0] * 12, *tile_map(x, 32))
    return out


@pytest.mark.parametrize("backwards", [False, True])
def test_tiles_reach_both_blocks_and_what_lies_outside_is_zeros(backwards: bool, folder: Path) -> None:
    pool = torch.randn(2, 90, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    x, turns = pool[:, 10:80, 8:112], 6  # 70 rows, 104 channels by strides; the third outer index does not exist
    seen = launch(folder, x, turns, backwards)
    padded = torch.zeros(3, 200, 128)
    padded[:2, :70, :104] = x
    for n in range(turns):
        right = padded[n // 2, 8 * n : 8 * n + 64, 64 * (n % 2) : 64 * (n % 2) + 64]
        assert all(torch.equal(block[n], right) for block in seen)


def test_a_place_that_one_block_gives_back_for_both_is_filled_too_early(folder: Path) -> None:
    x = torch.arange(12.0)[:, None, None].expand(12, 256, 128).bfloat16().contiguous()
    wrong = []
    for backwards in (False, True):
        try:
            seen = launch(folder, x, 8, backwards, emptied=1)
            wrong.append(any(not (block[n] == n // 2).all() for block in seen for n in range(8)))
        except EmulatorError:
            wrong.append(True)
    assert any(wrong)


def test_a_grid_that_is_no_whole_number_of_clusters(folder: Path) -> None:
    with pytest.raises(EmulatorError, match="clusters of 2"):
        launch(folder, torch.zeros(1, 64, 64).bfloat16(), 1, False, blocks=3)


def test_a_left_operand_across_its_rows(folder: Path) -> None:
    """64 x 16 times 16 x 48, K of the left one down the rows."""
    draw = torch.Generator().manual_seed(0)
    a, b, d = (
        torch.randn(64, 16, generator=draw).bfloat16(),
        torch.randn(16, 48, generator=draw).bfloat16(),
        torch.zeros(64, 48),
    )
    (folder / "probe.cu").write_text("""#include "device.h"
KERNEL(128, 1) f(bf16* a, bf16* b, float* d) {
    SHARED(memory);
    const int i = threadIdx.x;
    u8* right = memory + 2048;
    for (int n = i; n < 1024; n += 128) *(bf16*)(memory + in_block(n % 16, n / 16 / 8) + n / 16 % 8 * 2) = a[n];
    for (int n = i; n < 768; n += 128) *(bf16*)(right + in_block(n % 48, n / 48 / 8) + n / 48 % 8 * 2) = b[n];
    publish_operands();
    sync_threads();
    float x[24];
    products_begin();
    warpgroup_multiply<true, false>(x, operand(memory), operand(right), false);
    products_commit();
    products_wait<0>();
    for (int j = 0; j < 24; j++) d[(i / 32 * 16 + i % 32 / 4 + j / 2 % 2 * 8) * 48 + j / 4 * 8 + i % 4 * 2 + j % 2] = x[j];
}
""")
    with emulated():
        Kernel(folder / "probe.cu", "f", "PPP", threads=128, shared_bytes=8192 + 2048).launch((1,), a, b, d)
    torch.testing.assert_close(d, (a.double() @ b.double()).float(), rtol=1e-6, atol=1e-6)


def test_maps_lie_where_the_compiler_looks_for_them(folder: Path) -> None:
    """Offsets of parameters in the machine code, as NVIDIA's tool reads them."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "probe.cu").write_text(SOURCE)
    kernel = Kernel(folder / "probe.cu", "f", PARAMETERS + "q" * WORDS, threads=64, defines={"EMPTIED": 2})
    (folder / "probe.cubin").write_bytes(kernel.compiled()[0])
    told = subprocess.run(
        [tool, "-elf", folder / "probe.cubin"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    offsets = {int(n, 16): int(at, 16) for n, at in re.findall(r"Ordinal\s*:\s*(\S+)\s+Offset\s*:\s*(\S+)", told)}
    assert offsets[len(PARAMETERS)] == PLACE == struct.calcsize("@" + PARAMETERS)
