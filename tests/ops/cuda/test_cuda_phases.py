"""The emulator: phases that copies end, left operands in shared memory, votes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from perilune.ops.cuda import Kernel, emulated, emulator

if reason := emulator.missing():
    pytest.skip(reason, allow_module_level=True)


def launch(folder: Path, body: str, *tensors: Tensor, threads: int, shared: int, backwards: bool = False) -> None:
    """Run a kernel `f(a, b, ...)` of bfloat16 or float tensors with this body."""
    kinds = {torch.float32: "float*", torch.bfloat16: "bf16*"}
    parameters = ", ".join(f"{kinds[x.dtype]} {n}" for n, x in zip("abc", tensors, strict=False))
    source = folder / "probe.cu"
    source.write_text(
        f'#include "device.h"\nKERNEL({threads}, 1) f({parameters}) {{ SHARED(memory); int i = threadIdx.x; {body} }}\n'
    )
    with emulated(backwards):
        Kernel(source, "f", "P" * len(tensors), threads=threads, shared_bytes=shared).launch((1,), *tensors)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("columns", [64, 256])
def test_left_operand_in_shared_memory(columns: int, folder: Path) -> None:
    """64 x 16 times 16 x N, the right operand along its rows or across them."""
    a, b = random(64, 16).bfloat16(), random(16, columns).bfloat16()
    across = columns == 256
    d = torch.zeros(64, columns)
    launch(
        folder,
        f"""u8* right = memory + 8192;
        for (int n = i; n < 1024; n += 128) *(bf16*)(memory + in_block(n / 16, n % 16 / 8) + n % 8 * 2) = a[n];
        for (int n = i; n < 16 * {columns}; n += 128) {{
            const int k = n / {columns}, c = n % {columns};
            u8* to = {across:d} ? right + c / 64 * 2048 + in_block(k, c % 64 / 8) + c % 8 * 2 : right + in_block(c, k / 8) + k % 8 * 2;
            *(bf16*)to = b[n];
        }}
        publish_operands();
        sync_threads();
        float x[{columns // 2}];
        products_begin();
        warpgroup_multiply<{across:d}>(x, operand(memory), operand(right, 2048), false);
        products_commit();
        products_wait<0>();
        for (int j = 0; j < {columns // 2}; j++)
            c[(i / 32 * 16 + i % 32 / 4 + j / 2 % 2 * 8) * {columns} + j / 4 * 8 + i % 4 * 2 + j % 2] = x[j];""",
        a, b, d, threads=128, shared=16384,
    )  # fmt: skip
    torch.testing.assert_close(d, (a.double() @ b.double()).float(), rtol=1e-6, atol=1e-6)


# c: arrivals that the empty place counts; 1 where the place is given back before it is read.
RING = """u64* full = (u64*)memory; u64* empty = full + 1; float* place = (float*)(memory + 16);
if (i == 0) { phase_begin(full, 32); phase_begin(empty, (int)c[0]); }
sync_threads();
if (i < 32) for (int n = 0; n < 5; n++) {
    if (n) phase_wait(empty, (n & 1) ^ 1);
    copy_async(place + 4 * i, a + 128 * n + 4 * i);
    phase_arrive_by_copies(full);
}
else for (int n = 0; n < 5; n++) {
    phase_wait(full, n & 1);
    float4 x = *(float4*)(place + 4 * (i ^ 1) - 128);
    sync_warp();
    if (i == 32) phase_arrive(empty);
    if (c[1]) x = *(float4*)(place + 4 * (i ^ 1) - 128);
    *(float4*)(b + 128 * n + 4 * (i - 32)) = x;
}"""


def test_copies_through_a_place_that_is_filled_again(folder: Path) -> None:
    source = random(5, 16, 2, 4)

    def run(count: int, too_late: bool, backwards: bool) -> Tensor:
        to = torch.zeros(5, 16, 2, 4)
        choices = torch.tensor([float(count), float(too_late)])
        launch(folder, RING, source, to, choices, threads=64, shared=1024, backwards=backwards)
        return to

    for backwards in (False, True):
        assert torch.equal(run(1, False, backwards), source.flip(2))
        assert not torch.equal(run(1, True, backwards), source.flip(2)), "read after it was given back"
    with pytest.raises(emulator.EmulatorError, match="never reach"):
        run(2, False, False)
    with pytest.raises(emulator.EmulatorError, match="more arrivals"):
        run(0, False, False)


def test_votes(folder: Path) -> None:
    x = torch.zeros(64)
    x[40] = 1
    y = torch.zeros(64)
    launch(folder, "b[i] = any(a[i] != 0.0f);", x, y, threads=64, shared=0)
    assert torch.equal(y, torch.cat((torch.zeros(32), torch.ones(32))))
