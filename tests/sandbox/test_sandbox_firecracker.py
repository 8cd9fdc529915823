"""The `firecracker` driver against a double of Firecracker: the calls it makes, in their order, and what it makes of the answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.sandbox import Limits, Sandboxes, Spec
from perilune.sandbox.drivers import firecracker
from perilune.sandbox.drivers.firecracker import NOT_RUN, FirecrackerDriver
from perilune.sandbox.drivers.firecracker_api import Api, FirecrackerError
from perilune.sandbox.guest import build_image
from perilune.sandbox.guest.build_image import Image
from perilune.sandbox.protocol import DriverUnavailable, GuestFileError, GuestLost, Mismatch

DOUBLE = Path(__file__).parent / "firecracker_double.py"
SPEC = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=32 << 20))


@pytest.fixture
def log(tmp_path: Path, monkeypatch) -> Path:
    """A `firecracker` on the PATH that notes each call, and an image to boot."""
    tools, log = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    program = tools / "firecracker"
    program.write_text(f"#!{sys.executable} -IS\nimport sys, runpy\nsys.argv.insert(1, {str(log)!r})\n"
                       f"runpy.run_path({str(DOUBLE)!r}, run_name='__main__')\n")  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    image = Image("small", "/images/vmlinux", "/images/initrd", "k" * 32, "i" * 32, "6.1")
    monkeypatch.setattr(build_image, "image", lambda template: image)
    log.touch()
    return log


@pytest.fixture
def sandboxes(log: Path, tmp_path: Path) -> Iterator[Sandboxes]:
    with Sandboxes(tmp_path / "home", sync="none") as made:
        yield made


def calls(log: Path) -> list[list]:
    """What was called since the last time, without the questions for the version."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("")
    return [entry for entry in found if entry[1] != "/version"]


def names(log: Path) -> list[str]:
    return [f"{method} {path}" for method, path, _ in calls(log)]


def test_a_template_is_booted_and_saved_once_and_copies_are_loaded(sandboxes, log):
    sandboxes.create(SPEC, driver="firecracker")
    made = calls(log)
    assert [f"{method} {path}" for method, path, _ in made] == [
        "PUT /machine-config", "PUT /boot-source", "PUT /vsock", "PUT /entropy", "PUT /actions", "PATCH /vm", "PUT /snapshot/create",
        "PUT /snapshot/load",
    ]  # fmt: skip
    assert made[0][2] == {"vcpu_count": 1, "mem_size_mib": 128, "track_dirty_pages": True}
    assert made[6][2]["snapshot_type"] == "Full"
    assert made[7][2]["enable_diff_snapshots"] and made[7][2]["mem_backend"]["backend_type"] == "File"
    sandboxes.create(SPEC, driver="firecracker")
    assert names(log) == ["PUT /snapshot/load"]


def test_first_whole_then_diffs_and_resumed_to_the_third_generation(sandboxes, log):
    box = sandboxes.create(SPEC, driver="firecracker")
    calls(log)
    for generation in range(3):
        box.write_file(f"/{generation}", b"content %d" % generation)
        first = box.checkpoint()
        box.exec(["dirty", "20"])
        second = box.checkpoint()
        made = [entry[2] for entry in calls(log) if entry[1] == "/snapshot/create"]
        assert [one["snapshot_type"] for one in made] == ["Full" if generation == 0 else "Diff", "Diff"]
        assert second.new_bytes < 40 * 4096 and (generation or first.new_bytes > 40 * 4096)
        box.destroy()
        box = sandboxes.resume(second.id)
        assert [box.read_file(f"/{number}") for number in range(generation + 1)] == [
            b"content %d" % number for number in range(generation + 1)
        ]
    assert sandboxes.home.store.verify() == []
    with pytest.raises(GuestFileError, match="No such file"):
        box.read_file("/3")


def test_forks_are_loads_of_one_state_and_differ_in_randomness(sandboxes, log):
    box = sandboxes.create(SPEC, driver="firecracker")
    box.write_file("/a", b"common")
    calls(log)
    forks = box.fork(2)
    assert names(log) == ["PATCH /vm", "PUT /snapshot/create", "PATCH /vm", "PUT /snapshot/load", "PUT /snapshot/load"]
    forks[0].write_file("/a", b"own")
    assert [each.read_file("/a") for each in (box, *forks)] == [b"common", b"own", b"common"]
    assert len({each.exec(["uuid"]).stdout for each in (box, *forks)}) == 3
    assert box.exec(["cat"], stdin=b"echoed").stdout == b"echoed"


def test_pause_to_zero_ends_the_process_and_its_folder(sandboxes, tmp_path):
    box = sandboxes.create(SPEC, driver="firecracker")
    box.write_file("/a", b"kept")
    pidfd = os.pidfd_open(box._machine.pids()[0])
    box.pause()
    with pytest.raises(ProcessLookupError):
        import signal

        signal.pidfd_send_signal(pidfd, 0)
    os.close(pidfd)
    assert list((tmp_path / "home/firecracker/scratch").iterdir()) == []
    box.resume()
    assert box.read_file("/a") == b"kept"


def test_a_diff_whose_ground_was_collected_is_taken_whole(sandboxes, log):
    box = sandboxes.create(SPEC, driver="firecracker")
    box.write_file("/a", b"kept")
    snapshot = box.checkpoint()
    sandboxes.home.store.delete([snapshot.id])
    calls(log)
    again = box.checkpoint()
    assert [entry[2]["snapshot_type"] for entry in calls(log) if entry[1] == "/snapshot/create"] == ["Full"]
    assert sandboxes.resume(again.id).read_file("/a") == b"kept"


def test_a_machine_of_another_kernel_is_refused_by_field(sandboxes, monkeypatch):
    snapshot = sandboxes.create(SPEC, driver="firecracker").checkpoint()
    other = Image("small", "/images/vmlinux", "/images/initrd", "K" * 32, "i" * 32, "6.2")
    monkeypatch.setattr(build_image, "image", lambda template: other)
    sandboxes.driver("firecracker")._images.clear()
    with pytest.raises(Mismatch) as caught:
        sandboxes.resume(snapshot.id)
    assert caught.value.field == "kernel"


def test_refusals_are_told_in_firecrackers_words(sandboxes):
    box = sandboxes.create(SPEC, driver="firecracker")
    api: Api = box._machine.api
    with pytest.raises(FirecrackerError, match="only allowed on a paused microVM"):
        api.save(Path("/tmp/none"), Path("/tmp/none"), whole=True)
    with pytest.raises(FirecrackerError, match="not supported after starting"):
        api.call("PUT", "/vsock", {})
    os.kill(box._machine.pids()[0], 9)
    with pytest.raises(GuestLost):
        box.exec(["true"])


def test_a_program_that_ends_at_once_is_unavailable_with_its_words(sandboxes, tmp_path):
    program = tmp_path / "tools/firecracker"
    program.write_text("#!/bin/sh\necho 'no such option' >&2; exit 1\n")
    with pytest.raises(DriverUnavailable, match="no such option"):
        sandboxes.create(SPEC, driver="firecracker")
    assert sandboxes.home.records() == []


def test_the_probe_says_that_nobody_has_run_it(tmp_path, monkeypatch):
    monkeypatch.setattr(firecracker.shutil, "which", lambda name: None)
    found = FirecrackerDriver(tmp_path).probe()
    assert not found.passed and "is not installed" in found.reason and NOT_RUN in found.reason
    assert NOT_RUN in firecracker.CAPABILITIES.isolation
