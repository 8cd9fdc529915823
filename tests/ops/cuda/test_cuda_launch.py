"""What the driver is given for a launch that was laid out: by a driver that notes it down."""

from __future__ import annotations

import ctypes
import struct
import threading
from pathlib import Path

import pytest
import torch

from perilune.ops.cuda import CudaError, Kernel, Launch, driver
from perilune.ops.cuda import kernel as module

FUNCTION = 0xF00


class Driver:
    """Notes grids, threads, shared memory, streams, attributes and parameters; refuses while `status` is not 0."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []
        self.status = 0

    def cuLaunchKernelEx(self, how: object, function: ctypes.c_void_p, parameters: None, extra: object) -> int:
        given = how._obj  # type: ignore[attr-defined]
        words = list(extra)  # type: ignore[call-overload]
        assert parameters is None and words[0] == 1 and words[2] == 2 and not words[4]
        size = ctypes.c_size_t.from_address(words[3]).value
        early = [given.attributes[n].id for n in range(given.count)]
        grid, block = (given.grid_x, given.grid_y, given.grid_z), (given.block_x, given.block_y, given.block_z)
        self.seen.append(
            (grid, block, given.shared, given.stream, early, function.value, ctypes.string_at(words[1], size))
        )
        return self.status

    def cuGetErrorString(self, status: int, text: object) -> None:
        pass


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(driver, "_found", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x5000 + index, raising=False)
    monkeypatch.setattr(Kernel, "_function", lambda self, device: ctypes.c_void_p(FUNCTION))
    return found


def kernel(parameters: str = "PPPfqi", early: bool = False) -> Kernel:
    return Kernel(Path("none.cu"), "none", parameters, threads=96, shared_bytes=1000, early=early)


@pytest.mark.parametrize("early", [False, True])
def test_what_a_launch_is_made_of(early: bool, noted: Driver) -> None:
    x, device = torch.zeros(3), torch.device("cuda", 2)
    launch = kernel(early=early).fixed(device, (7, 5), 2.5, 2**40, -3)
    launch(x, None, 4096)
    launch(123, x, None)
    expected = [
        struct.pack("@PPPfqi", *pointers, 2.5, 2**40, -3)
        for pointers in ((x.data_ptr(), 0, 4096), (123, x.data_ptr(), 0))
    ]
    for seen, packed in zip(noted.seen, expected, strict=True):
        assert seen == ((7, 5, 1), (96, 1, 1), 1000, 0x5002, [6] if early else [], FUNCTION, packed)


def test_equal_launches_are_laid_out_once_and_only_so_many_kept(noted: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    one, device = kernel("Pi"), torch.device("cuda", 0)
    assert one.fixed(device, (4,), 1) is one.fixed(device, [4], 1) is not one.fixed(device, (4,), 2)
    assert one.fixed(torch.device("cuda", 1), (4,), 1) is not one.fixed(device, (4,), 1)
    for n in range(9):
        one.fixed(device, (4,), n)
    assert len(one._fixed) == 3


def test_nothing_to_do_and_a_refusal(noted: Driver) -> None:
    device = torch.device("cuda", 0)
    kernel("P").fixed(device, (3, 0))(1)
    assert not noted.seen
    noted.status = 1
    with pytest.raises(CudaError, match="driver error 1"):
        kernel("P").fixed(device, (3,))(1)


def test_threads_do_not_mix_their_pointers(noted: Driver) -> None:
    launch = kernel("PP").fixed(torch.device("cuda", 0), (1,))
    threads = [threading.Thread(target=lambda n=n: [launch(n, n) for _ in range(200)]) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = [struct.unpack("@PP", seen[-1]) for seen in noted.seen]  # type: ignore[arg-type]
    assert len(pairs) == 800 and all(a == b for a, b in pairs)


def test_the_pointers_come_first() -> None:
    with pytest.raises(AssertionError, match="pointers come first"):
        Launch(kernel("iP"), torch.device("cpu"), (1, 1, 1), (1,))
