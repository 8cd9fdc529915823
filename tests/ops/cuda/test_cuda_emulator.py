"""The emulator: each instruction of device.h against torch, and the faults that it is there to find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from perilune.ops.cuda import Kernel, emulated, emulator

if reason := emulator.missing():
    pytest.skip(reason, allow_module_level=True)


def launch(
    folder: Path,
    body: str,
    *tensors: Tensor,
    threads: int = 32,
    shared: int = 0,
    blocks: int = 1,
    backwards: bool = False,
) -> None:
    """Run a kernel `f(float* a, float* b, ...)` with this body, one parameter a tensor."""
    names = "abcdef"[: len(tensors)]
    kinds = {torch.float32: "float*", torch.bfloat16: "bf16*", torch.int32: "int*"}
    parameters = ", ".join(f"{kinds[x.dtype]} {n}" for n, x in zip(names, tensors, strict=True))
    source = folder / "probe.cu"
    source.write_text(
        f'#include "device.h"\nKERNEL({threads}, 1) f({parameters}) {{ SHARED(memory); int i = threadIdx.x; {body} }}\n'
    )
    kernel = Kernel(source, "f", "P" * len(tensors), threads=threads, shared_bytes=shared)
    with emulated(backwards):
        kernel.launch((blocks,), *tensors)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERILUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_blocks_and_threads(folder: Path) -> None:
    y = torch.full((3, 64), float("nan"))
    launch(folder, "a[blockIdx.x * 64 + i] = 100 * blockIdx.x + i + 1000 * gridDim.x;", y, threads=64, blocks=3)
    assert torch.equal(y, 3000 + 100 * torch.arange(3.0)[:, None] + torch.arange(64.0))


def test_elementary_functions_and_rounding(folder: Path) -> None:
    x = torch.tensor([0.5, 1.0, -3.0, 2.0**-126, 2.0**-127, 100.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8] * 4)
    e, r, p = (torch.empty(32) for _ in "erp")
    launch(folder, "b[i] = exp2_fast(a[i]); c[i] = reciprocal(a[i]); d[i] = high_half(pack(0, a[i]));", x, e, r, p)
    assert torch.equal(e, torch.exp2(x))
    assert torch.equal(r, torch.where(x.abs() < 2.0**-126, torch.inf, 1 / x)), "operands below 2^-126 count as 0"
    assert torch.equal(p, x.bfloat16().float())
    nan, one = torch.full((32,), float("nan")), torch.empty(32)
    launch(folder, "b[i] = low_half(pack(a[i], 1));", nan, one)
    assert one.isnan().all()


def test_shuffles(folder: Path) -> None:
    x = random(32)
    a, b, c = (torch.empty(32) for _ in "abc")
    launch(folder, "b[i] = shuffle_xor(a[i], 5); c[i] = shuffle(a[i], 7); d[i] = shuffle_up(a[i], 4);", x, a, b, c)
    lane = torch.arange(32)
    assert torch.equal(a, x[lane ^ 5]) and torch.equal(b, x[7].expand(32))
    assert torch.equal(c, torch.where(lane < 4, x, x[(lane - 4) % 32]))


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_in_and_out(transposed: bool, folder: Path) -> None:
    """16x16 through registers: what comes out is what went in, or its blocks of 8 transposed."""
    x, y, r = random(16, 16).bfloat16(), torch.zeros(16, 16).bfloat16(), torch.zeros(32, 4, dtype=torch.int32)
    suffix = "_transposed" if transposed else ""
    launch(
        folder,
        f"""bf16* m = (bf16*)memory;
        for (int n = i; n < 256; n += 32) m[n] = a[n];
        sync_warp();
        u32 r[4];
        load_matrices{suffix}(r, m + i % 16 * 16 + i / 16 * 8);
        for (int j = 0; j < 4; j++) c[4 * i + j] = (int)r[j];
        sync_warp();
        store_matrices(r, m + i % 16 * 16 + i / 16 * 8);
        sync_warp();
        for (int n = i; n < 256; n += 32) b[n] = m[n];""",
        x, y, r, shared=512,
    )  # fmt: skip
    blocks = x.view(2, 8, 2, 8)
    assert torch.equal(y, (blocks.transpose(1, 3) if transposed else blocks).reshape(16, 16))
    first = r[5, 1].view(1).view(torch.bfloat16)  # lane 5: row 1, columns 2 and 3 of the second matrix, rows 8 ..
    assert torch.equal(first, x[10:12, 1] if transposed else x[9, 2:4])


def test_products(folder: Path) -> None:
    a, b, d = random(16, 16).bfloat16(), random(8, 16).bfloat16(), torch.empty(16, 8)
    launch(
        folder,
        """u32 x[4]; const u32* A = (const u32*)a; const u32* B = (const u32*)b;
        const int r = i / 4, t = i % 4;
        x[0] = A[r * 8 + t]; x[1] = A[(r + 8) * 8 + t]; x[2] = A[r * 8 + t + 4]; x[3] = A[(r + 8) * 8 + t + 4];
        float y[4] = {1, 1, 1, 1};
        multiply_add(y, x, B[r * 8 + t], B[r * 8 + t + 4]);
        for (int n = 0; n < 4; n++) c[(r + n / 2 * 8) * 8 + 2 * t + n % 2] = y[n];""",
        a, b, d,
    )  # fmt: skip
    assert torch.allclose(d, 1 + a.float() @ b.float().T, atol=1e-6)
    a, b = random(16, 8), random(8, 8)
    launch(
        folder,
        """u32 x[4]; const int r = i / 4, t = i % 4;
        x[0] = to_tf32(a[r * 8 + t]); x[1] = to_tf32(a[(r + 8) * 8 + t]);
        x[2] = to_tf32(a[r * 8 + t + 4]); x[3] = to_tf32(a[(r + 8) * 8 + t + 4]);
        float y[4] = {};
        multiply_add_tf32(y, x, to_tf32(b[r * 8 + t]), to_tf32(b[r * 8 + t + 4]));
        for (int n = 0; n < 4; n++) c[(r + n / 2 * 8) * 8 + 2 * t + n % 2] = y[n];""",
        a, b, d,
    )  # fmt: skip
    error = (d - a @ b.T).abs().max()
    assert 1e-5 < error < 1e-2, "tf32 keeps 11 bits"


COPIES = """float* m = (float*)memory;
copy_async(m + 4 * i, a + 4 * i, i < 31);
copy_commit();
%s
float4 v = *(float4*)(m + 4 * (i ^ 1));
*(float4*)(b + 4 * i) = v;
copy_wait<0>();"""


def test_copies_arrive_at_the_wait_and_not_before(folder: Path) -> None:
    x, y = random(128), torch.zeros(128)
    swapped = x.view(16, 2, 4).flip(1).clone()
    swapped[15, 0] = 0  # the copy of lane 31 was told that there is nothing
    launch(folder, COPIES % "copy_wait<0>(); sync_warp();", x, y, shared=512)
    assert torch.equal(y.view(16, 2, 4), swapped)
    launch(folder, COPIES % "sync_warp();", x, y, shared=512)
    assert y.isnan().any()
    with pytest.raises(emulator.EmulatorError, match="copy under way"):
        launch(folder, "copy_async(memory + 16 * i, a + 4 * i);", x, shared=512)


def test_a_missing_barrier_shows_in_the_other_order(folder: Path) -> None:
    body = "float* m = (float*)memory; m[i] = a[i]; %s b[i] = m[63 - i];"
    x = random(64)
    results = {}
    for barrier in ("sync_threads();", ""):
        for backwards in (False, True):
            y = torch.zeros(64)
            launch(folder, body % barrier, x, y, threads=64, shared=256, backwards=backwards)
            results[barrier, backwards] = y
    assert torch.equal(results["sync_threads();", False], x.flip(0))
    assert torch.equal(results["sync_threads();", True], x.flip(0))
    assert results["", False].isnan().any() and results["", True].isnan().any()
    assert not torch.equal(results["", False].isnan(), results["", True].isnan())


def test_barriers_of_some_threads(folder: Path) -> None:
    """Two warps produce, two consume, under a barrier of their own number."""
    y = torch.zeros(64)
    launch(
        folder,
        """float* m = (float*)memory;
        if (i < 64) { m[i] = i; barrier_arrive(1, 128); }
        else { barrier_sync(1, 128); a[i - 64] = m[127 - i]; }""",
        y, threads=128, shared=256, backwards=True,
    )  # fmt: skip
    assert torch.equal(y, torch.arange(64.0).flip(0))


FAULTS = {  # what each case does, and how it is reported
    0: "never reach",  # a barrier for half of the threads
    1: "never come",  # a warp's instruction without its first lane
    2: "its warp met",  # two instructions at once
    3: "beyond shared memory",
    4: "does not exist",  # a barrier of one and a half warps
}


def test_what_no_kernel_may_do(folder: Path) -> None:
    for which, message in FAULTS.items():
        with pytest.raises(emulator.EmulatorError, match=message):
            launch(
                folder,
                """switch (a[0]) {
                case 0: if (i < 32) sync_threads(); break;
                case 1: if (i % 32) sync_warp(); break;
                case 2: if (i % 2) sync_warp(); else shuffle(1.0f, 0); break;
                case 3: if (i == 5) memory[64] = 1; break;
                case 4: barrier_sync(3, 48); break;
                }""",
                torch.tensor([which], dtype=torch.int32), threads=64, shared=64,
            )  # fmt: skip


def test_wrong_parameters_and_wrong_source(folder: Path) -> None:
    source = folder / "probe.cu"
    source.write_text('#include "device.h"\nKERNEL(32, 1) f(float* a, int n) { a[0] = n; }\n')
    x = torch.zeros(1)
    with emulated():
        with pytest.raises(emulator.EmulatorError, match="takes 12 bytes"):
            Kernel(source, "f", "P", threads=32).launch((1,), x)
        Kernel(source, "f", "Pi", threads=32).launch((1,), x, 3)
        assert x == 3
        source.write_text('#include "device.h"\nKERNEL(32, 1) f(float* a, int n) { a[0] = m; }\n')
        with pytest.raises(emulator.EmulatorError, match="does not compile"):
            Kernel(source, "f", "Pi", threads=32).launch((1,), x, 3)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("columns", [64, 128])
def test_products_of_a_warpgroup(across: bool, columns: int, folder: Path) -> None:
    """64 x 32 in registers times 32 x N in shared memory, twice, the second added; N along or across the rows there."""
    x, y = random(64, 32).bfloat16(), random(32, columns).bfloat16()
    stored = y if across else y.mT.contiguous()  # rows of at most 64 numbers, in blocks
    z = torch.full((64, columns), float("nan"))
    body = f"""
        const int rows = {32 if across else columns}, width = {columns if across else 32};
        for (int p = i; p < rows * width / 8; p += 128) {{
            const int row = p / (width / 8), piece = p % (width / 8);
            copy_async(memory + piece / 8 * 8192 + in_block(row, piece % 8), b + row * width + 8 * piece);
        }}
        copy_commit();
        copy_wait<0>();
        publish_operands();
        sync_threads();
        const int r = 16 * (i / 32) + i % 32 / 4, t = i % 4;
        u32 left[2][4];
        for (int s = 0; s < 2; s++)
            for (int e = 0; e < 4; e++) left[s][e] = *(u32*)(a + (r + 8 * (e & 1)) * 32 + 16 * s + 2 * t + 8 * (e >> 1));
        float d[{columns // 2}];
        u64 right = operand(memory, 8192);
        products_begin();
        for (int s = 0; s < 4; s++)
            warpgroup_multiply<{str(across).lower()}>(d, left[s % 2], further(right, (s % 2) * {2048 if across else 32}), s > 0);
        products_commit();
        products_wait<0>();
        for (int j = 0; j < {columns // 2}; j++)
            c[(r + 8 * (j / 2 % 2)) * {columns} + j / 4 * 8 + 2 * t + j % 2] = d[j];"""
    launch(folder, body, x, stored, z, threads=128, shared=16384)
    torch.testing.assert_close(z, 2 * x.float() @ y.float())


def test_a_result_before_the_wait_for_it(folder: Path) -> None:
    z = torch.zeros(128)
    body = """*(uint4*)(memory + 16 * i) = make_uint4(0, 0, 0, 0); sync_threads();
        u32 left[4] = {0, 0, 0, 0}; float d[32]; products_begin();
        warpgroup_multiply<false>(d, left, operand(memory), false); a[i] = d[0];
        products_commit(); products_wait<0>();"""
    launch(folder, body, z, threads=128, shared=8192)
    assert z.isnan().all()
