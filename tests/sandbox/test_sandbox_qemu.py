"""Virtual machines: what was in memory goes on in every copy, no copy is like another where it must not be, and failures have a type."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import ConfigError
from perilune.sandbox import Limits, Sandbox, Sandboxes, Spec
from perilune.sandbox.drivers import qemu_process, qemu_template
from perilune.sandbox.drivers.agent_channel import Channel
from perilune.sandbox.drivers.memory import Memory
from perilune.sandbox.protocol import DriverUnavailable, GuestFileError, GuestLost, Mismatch, StoreDamaged, StoreFull

TESTED_DRIVERS = ("qemu",)
DEADLINE = 60.0
TINY = Limits(memory_bytes=128 << 20, disk_bytes=32 << 20, processes=48)

# Answers what only a process that has run all the time can know. It is asked and answers through pipes that it holds open.
KEEPER = r"""
mkfifo /tmp/ask /tmp/answer /tmp/unread
exec 3<> /tmp/ask 4<> /tmp/answer 5<> /tmp/unread 6< /workspace/lines
read -r first <&6
value=kept-$(cat /proc/sys/kernel/random/uuid)
echo unread bytes >&5
(sh -c 'sleep 100000 & wait' & wait) &
nc -l -p 4000 -e cat &
echo $value > /workspace/value
while read -r what <&3; do
  case $what in
    value) echo $value >&4;;
    line) read -r line <&6; echo $line >&4;;
    unread) read -r line <&5; echo $line >&4; echo $line >&5;;
  esac
done
"""
COUNT = "(i=0; while :; do i=$((i+1)); echo $i > /workspace/n.new; mv /workspace/n.new /workspace/n; done) > /dev/null 2>&1 &"
TREE = r"for p in /proc/[0-9]*; do grep -q box $p/cgroup && echo $(cut -d' ' -f1,2,4 $p/stat); done 2>/dev/null | grep -E 'sleep|nc'"


def sh(box: Sandbox, script: str) -> str:
    result = box.exec(["sh", "-c", script], timeout=DEADLINE)
    assert result.code == 0, result
    return result.stdout.decode()


def ask(box: Sandbox, what: str) -> str:
    return sh(box, f"echo {what} > /tmp/ask; read -r line < /tmp/answer; echo $line").strip()


def test_all_that_runs_survives_to_the_third_generation(sandboxes: Sandboxes, box):
    box.write_file("/workspace/lines", b"".join(b"line %d\n" % number for number in range(10)))
    box.write_file("/workspace/keeper", KEEPER.encode())
    sh(box, "mount -t tmpfs none /mnt && echo mounted > /mnt/a; echo shared > /dev/shm/segment")
    sh(box, "sh /workspace/keeper > /dev/null 2>&1 &")
    sh(box, COUNT)
    sh(box, "until test -s /workspace/value && test -s /workspace/n; do :; done")
    value, tree = box.read_file("/workspace/value").decode().strip(), sh(box, TREE)
    assert value.startswith("kept-") and "sleep" in tree
    for generation in range(1, 4):
        snapshot = box.checkpoint()
        assert snapshot.contains == "machine" and snapshot.processes >= 4
        box.destroy()
        box = sandboxes.resume(snapshot.id)
        assert ask(box, "value") == value, "a variable in memory"
        assert ask(box, "line") == f"line {generation}", "the offset of an open file"
        assert ask(box, "unread") == "unread bytes", "what lies in a pipe"
        assert sh(box, "cat /mnt/a /dev/shm/segment") == "mounted\nshared\n"
        assert sh(box, TREE) == tree, "processes with their numbers and parents"
        before = int(box.read_file("/workspace/n"))
        sh(box, f"until test $(cat /workspace/n) -gt {before}; do :; done")
        assert 4000 in box.ports()
    with box.connect(4000) as connection:
        connection.settimeout(DEADLINE)
        connection.sendall(b"still listening")
        assert connection.recv(100) == b"still listening"


def test_t34_a_process_that_draws_all_the_time_draws_other_numbers_in_each_copy(sandboxes: Sandboxes, box):
    sh(box, "(while :; do cat /proc/sys/kernel/random/uuid >> /workspace/drawn; done) > /dev/null 2>&1 &")
    sh(box, "until test -s /workspace/drawn; do :; done")
    snapshot = box.checkpoint()
    copies = [sandboxes.resume(snapshot.id) for _ in range(2)]
    drawn = []
    for copy in copies:
        before = len(copy.read_file("/workspace/drawn").split())
        sh(copy, f"until test $(wc -l < /workspace/drawn) -gt {before}; do :; done")
        drawn.append([line for line in copy.read_file("/workspace/drawn").split() if len(line) == 36])
    common = set(drawn[0]) & set(drawn[1])
    assert drawn[0][: len(common)] == drawn[1][: len(common)], "only what was drawn before the checkpoint is in both"
    original = set(box.read_file("/workspace/drawn").split())
    assert common <= original
    names = ["/proc/sys/kernel/random/boot_id", "/etc/machine-id", "/etc/hostname", "/run/perilune/generation"]
    for name in names:
        assert len({sh(each, f"cat {name}") for each in (box, *copies)}) == 3, name


def test_forks_go_their_own_ways_in_memory(box):
    sh(
        box,
        "mkfifo /tmp/add /tmp/total; (exec 3<> /tmp/add; n=7; while read -r m <&3; do n=$((n+m)); echo $n > /tmp/total; done) > /dev/null 2>&1 &",
    )
    forks = box.fork(2)

    def add(each: Sandbox, number: int) -> int:
        return int(sh(each, f"echo {number} > /tmp/add; cat /tmp/total"))

    assert [add(forks[0], 1), add(forks[1], 10), add(box, 100), add(forks[0], 1)] == [8, 17, 107, 9]


def test_a_checkpoint_stores_what_was_written_since_and_no_zeros(box):
    box.write_file("/workspace/big", os.urandom(2_000_000))
    box.checkpoint()
    sh(box, "printf x | dd of=/workspace/big bs=1 seek=500000 conv=notrunc 2>/dev/null")
    second = box.checkpoint()
    assert second.new_bytes < 2_000_000 < second.bytes
    sh(box, "head -c 8000000 /dev/zero > /workspace/zeros")
    assert box.checkpoint().new_bytes < 4_000_000


@pytest.mark.parametrize("tracked", [True, False])
def test_a_checkpoint_reads_what_was_written_and_leaves_out_what_was_cleared(
    sandboxes: Sandboxes, spec, monkeypatch, tracked
):
    if not tracked:
        monkeypatch.setattr(qemu_process, "compiled", lambda source: None)
        monkeypatch.setattr(sandboxes.driver("qemu"), "_ahead", {})
    box = sandboxes.create(spec, driver="qemu")
    if tracked and box._machine.memory.written() is None:
        pytest.skip("this kernel does not track writes from outside (Linux 6.7)")
    box.write_file("/workspace/big", os.urandom(8_000_000))
    first, reads = box.checkpoint(), []
    read = Memory.read
    monkeypatch.setattr(Memory, "read", lambda self, number: reads.append(len(number)) or read(self, number))
    sh(box, "printf x | dd of=/workspace/big bs=1 seek=500000 conv=notrunc 2>/dev/null")
    second = box.checkpoint()
    assert (sum(reads) < 1500) is tracked, f"{sum(reads)} pages were read"
    assert second.new_bytes < 2_000_000 < 8_000_000 < second.bytes
    wanted = sh(box, "sha256sum /workspace/big")
    # What the second took over from the first is stored again where the first is gone.
    sandboxes.home.store.delete([first.id, second.id])
    third = box.checkpoint()
    assert third.new_bytes > 8_000_000 and sandboxes.home.store.verify() == []
    sh(box, "rm /workspace/big")
    assert box.checkpoint().bytes < third.bytes - 7_000_000
    again = sandboxes.resume(third.id)
    assert sh(again, "sha256sum /workspace/big") == wanted
    again.write_file("/workspace/more", b"of a resumed one")
    assert sandboxes.resume(again.checkpoint().id).read_file("/workspace/more") == b"of a resumed one"


def test_a_checkpoint_that_fails_costs_the_next_one_nothing(sandboxes: Sandboxes, box):
    box.checkpoint()
    box.write_file("/workspace/a", os.urandom(500_000))
    wanted, store = sh(box, "sha256sum /workspace/a"), sandboxes.home.store
    store.max_bytes = store.used_bytes()
    with pytest.raises(StoreFull):
        box.checkpoint()
    store.max_bytes = 64 << 30
    assert sh(sandboxes.resume(box.checkpoint().id), "sha256sum /workspace/a") == wanted


def test_collection_keeps_a_chains_newest_whole(sandboxes: Sandboxes, box):
    store, names = sandboxes.home.store, []
    for number in range(3):
        box.write_file(f"/workspace/{number}", bytes([65 + number]) * 100_000 + os.urandom(300_000))
        names.append(box.checkpoint().id)
    wanted = sh(box, "sha256sum /workspace/*")
    box.destroy()
    assert store.delete(names[:2]) > 0 and store.verify() == []
    assert sh(sandboxes.resume(names[2]), "sha256sum /workspace/*") == wanted
    store.delete(names[2:])
    assert store.used_bytes() == 0 and store.references() == {}


def test_a_damaged_page_is_named_and_nothing_starts(sandboxes: Sandboxes, box):
    box.write_file("/workspace/a", os.urandom(200_000))
    snapshot, store = box.checkpoint(), sandboxes.home.store
    record = store.read_machine(snapshot.layer)
    pack = next(name for name in record["packs"] if name not in record["template"]["packs"])
    whole = store.blob_path(pack).read_bytes()
    store.blob_path(pack).write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    with pytest.raises(StoreDamaged, match=pack):
        sandboxes.resume(snapshot.id)
    assert any(pack in line for line in store.verify())
    store.blob_path(pack).unlink()
    with pytest.raises(StoreDamaged, match=pack):
        sandboxes.resume(snapshot.id)
    assert len(sandboxes.home.records()) == 1


@pytest.mark.parametrize("field, other", [("mode", "kvm2"), ("qemu", "1.0"), ("kernel", "0" * 32), ("memory", "1")])
def test_a_machine_that_was_saved_elsewhere_is_refused_by_field(sandboxes: Sandboxes, box, field, other):
    snapshot, store = box.checkpoint(), sandboxes.home.store
    record = store.read_machine(snapshot.layer)
    parts = dict(part.split("=", 1) for part in record["made_of"].split())
    record["made_of"] = " ".join(f"{name}={value}" for name, value in {**parts, field: other}.items())
    with store.writing() as batch:
        layer = batch.put(json.dumps(record).encode())
    with pytest.raises(Mismatch) as caught:
        sandboxes.driver("qemu").make("sb", "0" * 32, box.spec, layer, str(store.root / "blobs"))
    assert caught.value.field == field


def test_a_snapshot_goes_to_another_store_and_runs_there_without_a_boot(
    sandboxes: Sandboxes, box, tmp_path, monkeypatch
):
    sh(box, "echo travelled > /workspace/a")
    here, snapshot = sandboxes.home.store, box.checkpoint()
    with Sandboxes(tmp_path / "elsewhere", sync="none") as there:
        fetched: list[str] = []
        record = here.export(snapshot.id)
        there.home.store.import_snapshot(record, lambda name: fetched.append(name) or here.blob_path(name).read_bytes())
        assert there.home.store.missing(snapshot.id) == set() and there.home.store.verify() == []
        assert set(fetched) == {snapshot.layer, *here.read_machine(snapshot.layer)["needs"]}
        monkeypatch.setattr(qemu_template.Templates, "_boot", None)
        assert there.resume(snapshot.id).read_file("/workspace/a") == b"travelled\n"
        with pytest.raises(StoreDamaged, match="another hash"):
            (there.home.store.blob_path(fetched[-1])).unlink()
            there.home.store.import_snapshot(record, lambda name: b"something else")


def test_a_panic_of_one_guest_is_lost_with_a_type_and_harms_no_other(sandboxes: Sandboxes, box, spec):
    other = sandboxes.create(spec, driver="qemu")
    with pytest.raises(GuestLost):
        box.exec(["sh", "-c", "echo c > /proc/sysrq-trigger; sleep 100"], timeout=DEADLINE)
    with pytest.raises((GuestLost, Exception), match="dead|ended"):
        box.exec(["true"])
    assert sh(other, "echo well") == "well\n"


def test_a_fork_bomb_and_a_full_memory_leave_the_agent_answering(sandboxes: Sandboxes):
    box = sandboxes.create(Spec(limits=TINY), driver="qemu")
    result = box.exec(["sh", "-c", "bomb() { bomb | bomb & }; bomb; sleep 100"], timeout=3)
    assert result.timed_out or result.code != 0
    fill = "dd if=/dev/zero of=/dev/null bs=80M count=1"
    filled = box.exec(["sh", "-c", f"{fill} & {fill}; wait"], timeout=DEADLINE)
    assert filled.out_of_memory
    full = box.exec(["sh", "-c", "head -c 200000000 /dev/zero | tr '\\0' x > /workspace/full"], timeout=DEADLINE)
    assert full.code != 0 and box.list("/workspace")[0].size <= box.spec.limits.disk_bytes
    assert sh(box, "echo well") == "well\n"


def test_no_guest_that_answers_is_said_with_the_console_and_leaves_nothing(
    sandboxes: Sandboxes, spec, monkeypatch, tmp_path
):
    monkeypatch.setattr(qemu_template, "BOOT_SECONDS", (0.001, 0.001))
    driver: Any = sandboxes.driver("qemu")
    monkeypatch.setattr(driver.templates, "folder", tmp_path / "none")
    started = []
    start = driver.keeper.start
    monkeypatch.setattr(
        driver.keeper, "start", lambda *args, **more: started.append(start(*args, **more)) or started[-1]
    )
    with pytest.raises(DriverUnavailable, match="no guest answered in 2 boots"):
        sandboxes.create(spec, driver="qemu")
    assert len(started) == 2 and not any(one.alive() for one in started)
    assert not any(path.is_dir() for path in (tmp_path / "none").iterdir()) and sandboxes.home.records() == []


def test_what_a_machine_cannot_have_is_refused(sandboxes: Sandboxes, tmp_path):
    for wrong in ({"trees": (str(tmp_path),)}, {"network": "host"}, {"changes": "disk"}, {"template": "no-such-image"}):
        with pytest.raises(ConfigError):
            sandboxes.create(Spec(**wrong), driver="qemu")
    assert sandboxes.home.records() == []


def test_a_missing_qemu_is_a_reason_with_a_remedy(monkeypatch):
    monkeypatch.setattr(qemu_process.shutil, "which", lambda name: None)
    with pytest.raises(DriverUnavailable, match="apt-get install qemu-system-x86"):
        qemu_process.program()


def test_no_machine_survives_an_owner_that_is_killed(driver, home, spec):
    script = (
        "import sys\nfrom pathlib import Path\nfrom perilune.sandbox import Limits, Sandboxes, Spec\n"
        "box = Sandboxes(Path(sys.argv[1]), sync='none').create(Spec(limits=Limits(disk_bytes=32 << 20)), driver='qemu')\n"
        "print(box._machine.pids()[0], flush=True); box.exec(['sleep', '1000'])"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(home)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pidfd = os.pidfd_open(int(owner.stdout.readline()))
    owner.send_signal(signal.SIGKILL)
    owner.wait(DEADLINE)
    assert select.select([pidfd], [], [], DEADLINE)[0], "a machine outlived its owner"
    os.close(pidfd)


def test_the_command_line_gives_the_guests_output_and_exit_code_and_no_two_are_alike(driver, home):
    seen = set()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "perilune", "sandbox", "run", "--driver", "qemu", "--", "sh", "-c",
             "uname -s; cat /proc/sys/kernel/random/uuid; echo aside >&2; exit 7"],
            capture_output=True, text=True, timeout=DEADLINE * 3, env={**os.environ, "PERILUNE_SANDBOX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        kernel, number = done.stdout.splitlines()
        assert done.returncode == 7 and kernel == "Linux" and done.stderr == "aside\n"
        seen.add(number)
    assert len(seen) == 2


def test_the_clock_neither_runs_fast_nor_stands_still(box):
    _check_clock(box)
    sh(box, "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done")
    _check_clock(box)
    box.pause(keep_memory=True)
    box.resume()
    _check_clock(box)


def _check_clock(box: Sandbox) -> None:
    before = time.time()
    sh(box, ": > /tmp/now")
    after = time.time()
    seen = next(file.mtime_ns for file in box.list("/tmp") if file.name == "now") / 1e9
    assert before - 0.5 < seen < after + 0.5


def test_an_image_of_ones_own_boots(sandboxes: Sandboxes, tmp_path):
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/mine").write_text("of my own")
    busybox = subprocess.run(["sh", "-c", "command -v busybox"], capture_output=True, text=True).stdout.strip()
    if not busybox:
        pytest.skip("no busybox on this machine to make an image of (apt-get install busybox-static)")
    (root / "bin/busybox").write_bytes(Path(busybox).read_bytes())
    (root / "bin/busybox").chmod(0o755)
    for name in ("sh", "cat"):
        (root / "bin" / name).symlink_to("busybox")
    box = sandboxes.create(Spec(template=str(root), limits=TINY), driver="qemu")
    assert sh(box, "cat /etc/mine") == "of my own"
    with pytest.raises(GuestFileError, match="No such file"):
        box.read_file("/bin/ls")


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_a_guest_that_speaks_no_frames_is_lost_and_nothing_else(data):
    mine, its = socket.socketpair()
    channel = Channel("fuzzed", mine)
    command = channel.start(["true"], {}, "/")
    its.sendall(data)
    its.shutdown(socket.SHUT_WR)
    assert select.select([command.status_fd()], [], [], DEADLINE)[0]
    command.close()
    with pytest.raises(GuestLost):
        channel.start(["true"], {}, "/")
    channel.close()
    its.close()
