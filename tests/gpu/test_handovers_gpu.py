"""Ways of handing shared memory from some warps to others, each by itself, as the kernels use them.

They are right on every device; NVIDIA's racecheck (compute-sanitizer of CUDA 13.0) reports some of them, and so the kernels that use
these: barriers at which one side only arrives, and rings in which one lane arrives for its warp. To see it:

    compute-sanitizer --tool racecheck python -m pytest tests/gpu/test_handovers_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perilune.ops.cuda import Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Two groups of 128 threads hand numbers to each other in turns: one writes, then a barrier, then the other one reads.
TURNS = """#include "device.h"
KERNEL(256, 1) f(const float* in, float* out, int steps) {
    SHARED(memory);
    float* const x = (float*)memory;
    const int group = uniform(threadIdx.x >> 7), t = threadIdx.x & 127;
    float sum = 0.0f;
    for (int i = 0; i < steps; i++) {
        const int writer = i & 1;
        if (group == writer) {
            x[128 * writer + t] = in[128 * i + t];
            HAND_OVER
        } else {
            TAKE
            sum += x[128 * writer + 127 - t];
        }
    }
    out[threadIdx.x] = sum;
}
"""
NUMBERED = "if (writer) {what}(2, 256); else {what}(1, 256);"
ARRIVE, SYNC = (NUMBERED.format(what=f"barrier_{name}") for name in ("arrive", "sync"))
BARRIERS = {
    "one side arrives, number in a register": ("barrier_arrive(1 + writer, 256);", "barrier_sync(1 + writer, 256);"),
    "one side arrives, constant number": (ARRIVE, SYNC),
    "both sides wait, number in a register": ("barrier_sync(1 + writer, 256);", "barrier_sync(1 + writer, 256);"),
    "both sides wait, constant number": (SYNC, SYNC),
    "both sides wait at the barrier of all threads": ("sync_threads();", "sync_threads();"),
}

# Warp 0 fills two places in turns, warp 1 reads them; both wait for mbarriers by parity.
RING = """#include "device.h"
KERNEL(64, 1) f(const float* in, float* out, int steps) {
    SHARED(memory);
    u64* const full = (u64*)memory;
    u64* const empty = full + 2;
    float* const places = (float*)(memory + 128);
    const int lane = threadIdx.x & 31;
    if (threadIdx.x < 2) {
        phase_begin(full + threadIdx.x, 32);
        phase_begin(empty + threadIdx.x, EMPTIED);
    }
    sync_threads();
    float sum = 0.0f;
    for (int i = 0; i < steps; i++) {
        float* const place = places + (i & 1) * 128;
        if (threadIdx.x < 32) {
            if (i >= 2) phase_wait(empty + (i & 1), (i >> 1 & 1) ^ 1);
            FILL
        } else {
            phase_wait(full + (i & 1), i >> 1 & 1);
            const float4 x = *(const float4*)(place + 4 * (lane ^ 1));
            sum += x.x + x.y + x.z + x.w;
            GIVE_BACK
        }
    }
    copy_commit();
    copy_wait<0>();
    if (threadIdx.x >= 32) out[lane] = sum;
}
"""
COPY = "copy_async(place + 4 * lane, in + 128 * i + 4 * lane); phase_arrive_by_copies(full + (i & 1));"
STORE = "*(float4*)(place + 4 * lane) = *(const float4*)(in + 128 * i + 4 * lane); phase_arrive(full + (i & 1));"
ONE = "sync_warp(); if (lane == 0) phase_arrive(empty + (i & 1));"
ALL = "phase_arrive(empty + (i & 1));"
RINGS = {
    "copies, one lane arrives for its warp": (COPY, ONE, 1),
    "copies, all lanes arrive": (COPY, ALL, 32),
    "stores, one lane arrives for its warp": (STORE, ONE, 1),
    "stores, all lanes arrive": (STORE, ALL, 32),
}
STEPS = 64


def run(
    folder: Path, source: str, threads: int, device: str = "cuda", **macros: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that were handed over `[STEPS, 128]`, and what each reading thread made of them."""
    (folder / "probe.cu").write_text(source)
    given = torch.randint(-50, 50, (STEPS, 128), generator=torch.Generator().manual_seed(0)).float().to(device)
    out = torch.zeros(256, device=device)
    kernel = Kernel(folder / "probe.cu", "f", "PPi", threads=threads, shared_bytes=128 + 1024, defines=macros)
    kernel.launch((1,), given, out, STEPS)
    return given.cpu(), out.cpu()


@pytest.mark.parametrize("name", BARRIERS)
def test_barriers(name: str, tmp_path: Path) -> None:
    hand_over, take = BARRIERS[name]
    given, out = run(tmp_path, TURNS.replace("HAND_OVER", hand_over).replace("TAKE", take), 256)
    for group in (0, 1):
        assert torch.equal(out[128 * group :][:128], given[1 - group :: 2].sum(0).flip(0))


@pytest.mark.parametrize("name", RINGS)
def test_rings(name: str, tmp_path: Path) -> None:
    fill, give_back, emptied = RINGS[name]
    source = RING.replace("FILL", fill).replace("GIVE_BACK", give_back)
    given, out = run(tmp_path, source, 64, EMPTIED=emptied)
    assert torch.equal(out[:32], given.sum(0).view(32, 4).sum(1)[torch.arange(32) ^ 1])
