"""What every driver must do, whichever mechanism it has: run, stream, files, ports, save, resume, fork, pause."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import threading
import time
from typing import Any

import pytest

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox import Limits, Output, Sandbox, Sandboxes, Spec, State
from perilune.sandbox.drivers import running
from perilune.sandbox.guest import rooting
from perilune.sandbox.protocol import CHANGES, GuestFileError, GuestLost, SecretInSnapshot, TransitionError

DEADLINE = 30.0
COUNT = "(i=0; while :; do i=$((i+1)); echo $i > /workspace/n.new; mv /workspace/n.new /workspace/n; done) > /dev/null 2>&1 &"
"""Counts in the background, never with half a number in its file."""


def sh(box: Sandbox, script: str, **options) -> str:
    result = box.exec(["sh", "-c", script], **options)
    assert result.code == 0, result
    return result.stdout.decode(errors="surrogateescape")


def files_only(sandboxes: Sandboxes, driver: str) -> None:
    """For what a driver whose snapshots hold files is asked; `test_sandbox_qemu.py` asks machines the same of their memory."""
    if sandboxes.driver(driver).contains != "files":
        pytest.skip(f"{driver} saves whole machines")


def wait_until(box: Sandbox, script: str) -> None:
    """Until the script succeeds in the guest, which looks again without a pause of ours."""
    sh(box, f"until {script}; do :; done", timeout=DEADLINE)


def test_streams_exit_code_and_what_the_driver_promises(shared_box, driver):
    result = shared_box.exec(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\0put")
    assert (result.code, result.stdout, result.stderr, result.signal) == (7, b"in\0put", b"err\n", 0)
    assert result.driver == driver
    assert {"isolation", "network", "memory limit"} <= {guarantee.name for guarantee in result.guarantees}
    assert not result.timed_out and not result.truncated
    # A container's engine does not tell what a command used.
    assert result.peak_bytes > 0 or driver == "docker"


def test_a_killed_and_a_missing_program(shared_box):
    killed = shared_box.exec(["sh", "-c", "kill -9 $$"])
    assert (killed.code, killed.signal) == (137, 9)
    missing = shared_box.exec(["no-such-program"])
    assert missing.code == 127 and b"no-such-program" in missing.stderr
    assert shared_box.exec(["/etc/passwd"]).code == 126
    with pytest.raises(ConfigError, match="NUL"):
        shared_box.exec(["a\0b"])


def test_large_input_and_output_pass_unchanged(shared_box):
    data = os.urandom(900_000)
    assert shared_box.exec(["cat"], stdin=data).stdout == data


def test_input_from_a_descriptor_that_is_written_while_the_program_runs(shared_box):
    read, write = os.pipe()
    answers: list[bytes] = []

    def answer(output: Output) -> None:
        answers.append(output.data)
        os.write(write, b"second\n") if len(answers) == 1 else os.close(write)

    os.write(write, b"first\n")
    try:
        result = shared_box.exec(["cat"], stdin=read, on_output=answer, timeout=DEADLINE)
    finally:
        os.close(read)
    assert answers == [b"first\n", b"second\n"] and result.code == 0


def test_output_comes_while_the_program_runs(shared_box):
    read, write = os.pipe()
    execution = shared_box.start(["sh", "-c", "echo first; read line; echo $line"], stdin=read, timeout=DEADLINE)
    first = next(iter(execution))
    assert first == Output("stdout", b"first\n")
    os.write(write, b"second\n")
    result = execution.result()
    assert (result.code, result.stdout) == (0, b"first\nsecond\n")
    os.close(read)
    os.close(write)


def test_output_that_is_unread_at_the_end_is_neither_lost_nor_doubled(shared_box, monkeypatch):
    """The command has ended before its second piece is read."""
    monkeypatch.setattr(running, "PIECE", 1000)
    execution = shared_box.start(["sh", "-c", "seq 10000; seq 5 >&2"], timeout=DEADLINE)
    outputs = iter(execution)
    first = next(outputs)
    assert select.select([execution.process.status_fd()], [], [], DEADLINE)[0]
    rest = list(outputs)
    result = execution.result()
    wanted = "".join(f"{number}\n" for number in range(1, 10001)).encode()
    assert result.stdout == wanted and result.stderr == b"1\n2\n3\n4\n5\n"
    assert b"".join(output.data for output in [first, *rest] if output.stream == "stdout") == wanted


def test_output_beyond_the_limit_is_counted_and_dropped(shared_box):
    result = shared_box.exec(["sh", "-c", "head -c 3000000 /dev/zero; echo end >&2"])
    assert (len(result.stdout), result.stdout_bytes, result.stderr) == (1 << 20, 3_000_000, b"end\n")
    assert result.truncated


def test_a_background_process_neither_holds_a_command_up_nor_ends_with_it(shared_box):
    sh(shared_box, "mkfifo /tmp/go; (read line < /tmp/go; echo done > /tmp/done) & echo started", timeout=DEADLINE)
    sh(shared_box, "echo > /tmp/go")
    wait_until(shared_box, "test -s /tmp/done")


def test_timeout_ends_all_that_a_command_started_and_nothing_else(box, driver):
    sh(box, "sleep 1000 > /dev/null 2>&1 & echo $! > /tmp/other")
    result = box.exec(
        ["sh", "-c", "trap '' TERM; sleep 1001 & (sleep 1001 &) ; echo x; wait"], timeout=3 if driver == "qemu" else 0.2
    )
    assert result.timed_out and result.signal == 9 and result.stdout == b"x\n"
    wait_until(box, "test $(cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 100[1]') = 0")
    sh(box, "kill -0 $(cat /tmp/other)")


def test_several_commands_at_once(shared_box):
    sh(shared_box, "mkfifo /tmp/a /tmp/b")
    results = {}

    def one(name: str, script: str) -> None:
        results[name] = shared_box.exec(["sh", "-c", script], timeout=DEADLINE).stdout

    threads = [
        threading.Thread(target=one, args=("reader", "echo ping > /tmp/a; cat /tmp/b")),
        threading.Thread(target=one, args=("writer", "cat /tmp/a; echo pong > /tmp/b")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert results == {"reader": b"pong\n", "writer": b"ping\n"}


def test_environment_is_the_sandboxs_own(shared_box, monkeypatch):
    monkeypatch.setenv("HOST_ONLY", "yes")
    lines = sh(shared_box, "env", env={"A": "b c"}).splitlines()
    assert "A=b c" in lines and f"PERILUNE_SANDBOX={shared_box.id}" in lines
    assert not any("HOST_ONLY" in line for line in lines)


def test_files(shared_box):
    data = os.urandom(200_001)
    shared_box.write_file("/workspace/deep/er/file", data, mode=0o640)
    assert shared_box.read_file("/workspace/deep/er/file") == data
    entry = shared_box.list("/workspace/deep/er")[0]
    assert (entry.name, entry.kind, entry.size, entry.mode) == ("file", "file", 200_001, 0o640)
    with pytest.raises(GuestFileError, match="No such file"):
        shared_box.read_file("/workspace/none")
    with pytest.raises(GuestFileError, match="more than the 100 asked for"):
        shared_box.read_file("/workspace/deep/er/file", max_bytes=100)
    sh(shared_box, "mkfifo /workspace/pipe")
    for path in ("/workspace/pipe", "/workspace/deep", "/dev/zero"):
        with pytest.raises(GuestFileError):
            shared_box.read_file(path)
    with pytest.raises(GuestFileError, match="not a regular file"):
        shared_box.write_file("/workspace/pipe", b"x")


def test_ports_are_reached_without_a_network(python_box, python):
    server = (
        "import socket; s = socket.create_server(('127.0.0.1', 8123)); print('up', flush=True)\n"
        "while True:\n c, _ = s.accept(); c.sendall(c.recv(100).upper()); c.close()"
    )
    execution = python_box.start([python, "-S", "-c", server], timeout=DEADLINE)
    assert next(iter(execution)).data == b"up\n"
    assert python_box.ports() == [8123]
    with python_box.connect(8123) as connection:
        connection.settimeout(DEADLINE)
        connection.sendall(b"hello")
        assert connection.recv(100) == b"HELLO"
    with pytest.raises(GuestFileError, match="refused"):
        python_box.connect(9)
    execution.kill()
    assert execution.result().signal == 9


PREPARE = r"""
mkdir -p /workspace/tree/empty && cd /workspace/tree
printf 'a\nb' > text && chmod 4751 text && ln text hard && ln -s ../nowhere link && ln -s /etc/passwd absolute && mkfifo pipe
touch -d '2001-02-03 04:05:06' text && head -c 5 /dev/zero > zeros && : > nothing
mkdir 'odd '"$(printf '\303\251\n\377')" && chmod 1777 empty && touch -d '1999-01-01' empty
rm /etc/shells && rm -r /etc/alternatives && mkdir /etc/alternatives && echo new > /etc/alternatives/mine
echo changed >> /etc/hosts && truncate -s 3M sparse && printf x | dd of=sparse bs=1 seek=2000000 conv=notrunc 2>/dev/null
head -c 200000 /dev/urandom > big && echo shared > /dev/shm/segment && chown 0:0 big
"""
LOOK = r"""
cd / && find workspace etc dev/shm -exec stat -c '%n %f %u %g %s %Y %N' {} + | grep -Ev 'etc/(hostname|machine-id)' | sort
find workspace/tree etc/hosts dev/shm -type f -exec cksum {} + | sort
stat -c '%h' workspace/tree/text
"""


def look_for(driver: str) -> str:
    """LOOK, without what an engine mounts anew in every container."""
    if driver != "docker":
        return LOOK
    return (
        LOOK.replace("etc dev/shm", "etc")
        .replace(" etc/hosts dev/shm", "")
        .replace("machine-id", "machine-id|hosts|resolv.conf|mtab")
    )


@pytest.mark.parametrize("changes", CHANGES)
def test_a_resumed_sandbox_has_the_same_files_to_the_third_generation(sandboxes, driver, changes):
    if changes == "disk":
        files_only(sandboxes, driver)
    box = sandboxes.create(Spec(changes=changes), driver=driver)
    look = look_for(driver)
    sh(box, PREPARE)
    wanted = sh(box, look)
    assert "workspace/tree/hard" in wanted and "etc/shells" not in wanted and "etc/alternatives/mine" in wanted
    generations = {box.generation}
    for _ in range(3):
        snapshot = box.checkpoint()
        box.destroy()
        box = sandboxes.resume(snapshot.id)
        generations.add(box.generation)
        assert sh(box, look) == wanted
        assert sh(box, "ls -A /etc/alternatives") == "mine\n"
    assert len(generations) == 4


def test_changes_on_disk_are_outside_of_memory_and_end_with_the_sandbox(sandboxes, home, driver):
    files_only(sandboxes, driver)
    if driver == "docker":
        pytest.skip("docker: changes lie on the engine's disk, and the engine removes them with the container")
    limits = Limits(memory_bytes=48 << 20, disk_bytes=64 << 20)
    box = sandboxes.create(Spec(limits=limits, changes="disk"), driver=driver)
    for number in range(3):
        sh(box, f"head -c 30000000 /dev/zero | tr '\\0' x > /workspace/{number}")
    too_large = box.exec(["sh", "-c", "head -c 70000000 /dev/zero > /workspace/large"])
    assert too_large.code != 0 and box.list("/workspace")[-1].size <= 64 << 20
    assert not next(found for found in too_large.guarantees if found.name == "disk limit").held
    sh(box, "mkdir -p /workspace/closed/in && chmod 0 /workspace/closed/in /workspace/closed")
    assert any(path.is_file() for path in (home / driver / "scratch").rglob("*"))
    box.destroy()
    assert list((home / driver / "scratch").iterdir()) == []


def test_a_file_system_without_attributes_is_noticed(tmp_path):
    assert not rooting._keeps_attributes("/proc")
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(os, "setxattr", lambda path, name, value: seen.append(name))
        patch.setattr(os, "removexattr", lambda path, name: seen.remove(name))
        assert rooting._keeps_attributes(str(tmp_path)) and seen == []


def test_text_where_words_or_bytes_are_needed_is_refused_with_what_to_write(shared_box):
    with pytest.raises(ConfigError, match=r"\['sh', '-c', 'ls /'\]"):
        shared_box.exec("ls /")
    for call in (
        lambda: shared_box.exec(["cat"], stdin="text"), lambda: shared_box.write_file("/workspace/a", "text"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="must be bytes, not str"):
            call()
    with pytest.raises(ConfigError, match="not int"):
        shared_box.exec(["env"], env={"A": 1})
    for timeout in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="above zero and at most"):
            shared_box.exec(["true"], timeout=timeout)


def test_variables_that_cannot_be_are_refused(shared_box):
    for variables in ({"A=B": "1"}, {"": "1"}, {"A": "\0"}):
        with pytest.raises(ConfigError, match="without '='"):
            shared_box.exec(["true"], env=variables)


def test_a_checkpoint_stores_only_what_is_new(sandboxes, box, driver):
    files_only(sandboxes, driver)
    box.write_file("/workspace/big", os.urandom(1_000_000))
    first = box.checkpoint()
    sh(box, "printf x | dd of=/workspace/big bs=1 seek=500000 conv=notrunc 2>/dev/null")
    second = box.checkpoint()
    assert first.new_bytes >= 1_000_000 and second.new_bytes < 3 * 65536
    assert second.parent == first.id and second.bytes == 1_000_000


def test_zeros_are_not_stored(sandboxes, box, driver):
    files_only(sandboxes, driver)
    sh(box, "truncate -s 20M /workspace/hole; head -c 5000000 /dev/zero > /workspace/zeros")
    assert box.checkpoint().new_bytes < 20_000


def test_a_write_through_a_mapping_is_saved_although_no_time_stamp_tells_of_it(sandboxes, python_box, python):
    script = (
        "import mmap, os, sys\nf = open('/workspace/mapped', 'w+b'); f.truncate(8192); m = mmap.mmap(f.fileno(), 8192)\n"
        "m[0] = 1\nprint('ready', flush=True); os.read(0, 1); before = os.stat('/workspace/mapped').st_mtime_ns\n"
        "m[4096] = 77; print('written', flush=True); os.read(0, 1)"
    )
    read, write = os.pipe()
    execution = python_box.start([python, "-S", "-c", script], stdin=read, timeout=DEADLINE)
    outputs = iter(execution)
    assert next(outputs).data == b"ready\n"
    python_box.checkpoint()
    os.write(write, b"x")
    assert next(outputs).data == b"written\n"
    snapshot = python_box.checkpoint()
    execution.kill()
    execution.result()
    os.close(write)
    os.close(read)
    assert sandboxes.resume(snapshot.id).read_file("/workspace/mapped")[4096] == 77


def test_forks_start_equal_and_share_nothing(box):
    sh(box, "echo common > /workspace/a")
    forks = box.fork(2)
    for number, fork in enumerate(forks):
        assert fork.read_file("/workspace/a") == b"common\n"
        sh(fork, f"echo {number} > /workspace/a; echo {number} > /dev/shm/s")
    assert [fork.read_file("/workspace/a") for fork in forks] == [b"0\n", b"1\n"]
    assert box.read_file("/workspace/a") == b"common\n" and box.list("/dev/shm") == []
    assert len({box.id, *(fork.id for fork in forks)}) == 3


def test_t34_forks_differ_in_randomness_and_identity_and_their_clocks_are_right(box):
    script = "cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1; echo $PERILUNE_GENERATION; hostname; : > /tmp/now"
    seen = []
    for fork in box.fork(3):
        before = time.time()
        seen.append(sh(fork, script).splitlines())
        after = time.time()
        clock = next(file.mtime_ns for file in fork.list("/tmp") if file.name == "now") / 1e9
        # A small image's `stat` tells whole seconds.
        assert before - (1.0 if clock == int(clock) else 0.5) < clock < after + 0.5
    for row in zip(*seen):
        assert len(set(row)) == 3, row


def test_t35_a_checkpoint_leaves_the_background_running_and_says_what_a_resume_brings_back(sandboxes, box, driver):
    sh(box, COUNT)
    wait_until(box, "test -s /workspace/n")
    snapshot = box.checkpoint()
    before = int(box.read_file("/workspace/n"))
    wait_until(box, f"test $(cat /workspace/n) -gt {before}")
    resumed = sandboxes.resume(snapshot.id)
    capability = resumed.capabilities()
    saved = int(resumed.read_file("/workspace/n"))
    if capability.snapshot == "machine":
        assert saved > 0 and snapshot.processes >= 1
        wait_until(resumed, f"test $(cat /workspace/n) -gt {saved}")
    else:
        assert 0 < saved <= before
        # Process 1, sh, ls, grep; a container's process 1 has a child that sleeps.
        most = 5 if driver == "docker" else 4
        assert 3 <= int(sh(resumed, "ls /proc | grep -c '^[0-9]'; true")) <= most
        assert int(resumed.read_file("/workspace/n")) == saved
        assert snapshot.processes >= 1 and snapshot.contains == "files"


def test_t36_a_restore_at_once_after_a_restore_answers_and_the_old_life_does_not(sandboxes, box):
    sh(box, "echo 0 > /workspace/n")
    old = []
    for number in range(4):
        snapshot = box.pause()
        machine, generation = box._machine, box.generation
        assert machine is None
        box.resume()
        old.append(generation)
        assert sh(box, "echo $PERILUNE_GENERATION; cat /workspace/n").split() == [box.generation, str(number)]
        sh(box, f"echo {number + 1} > /workspace/n")
        assert snapshot.generation == generation
    assert len({*old, box.generation}) == 5


def test_a_command_of_an_ended_life_is_lost_and_not_answered_by_the_next(box):
    execution = box.start(["sleep", "1000"])
    box.pause()
    box.resume()
    with pytest.raises(GuestLost):
        execution.result()
    assert sh(box, "echo alive") == "alive\n" and box.state is State.RUNNING


def test_pause_in_memory_stops_time_for_the_guest(box):
    sh(box, COUNT)
    wait_until(box, "test -s /workspace/n")
    generation = box.generation
    assert box.pause(keep_memory=True) is None
    with pytest.raises(TransitionError, match="is paused and cannot go to exec"):
        box.exec(["true"])
    assert len({_state(box) for _ in range(3)}) == 1
    box.resume()
    assert box.generation == generation
    before = int(box.read_file("/workspace/n"))
    wait_until(box, f"test $(cat /workspace/n) -gt {before}")


def _state(box: Sandbox) -> bytes:
    """The counter of a guest that stands still, or all of its memory."""
    machine: Any = box._machine
    if hasattr(machine, "memory"):
        return hashlib.sha256(machine.memory.read(machine.memory.own_pages())).digest()
    if hasattr(machine, "container"):
        return next(content for _, content in machine.engine.archive(machine.container, "/workspace/n"))
    return next(bytes(chunks[0] or b"") for entry, chunks in machine.capture() if entry["path"] == "workspace/n")


def test_a_program_on_a_terminal_sees_it_and_the_size_of_its_window(shared_box):
    wait = "until test \"$(stty size 2> /dev/null)\" = '33 101'; do :; done; stty size"
    script = f"test -t 0 && {wait}; read line; echo got $line; stty size; exit 5"
    process = shared_box.terminal(["sh", "-c", script], size=(33, 101))
    with contextlib.closing(process):
        said = terminal_until(process, b"33 101")
        process.resize(40, 99)
        os.write(process.terminal, b"words\n")
        assert terminal_until(process, b"got words\r\n40 99", said)
        assert select.select([process.status_fd()], [], [], DEADLINE)[0] and process.finish()["code"] == 5


def terminal_until(process: Any, words: bytes, said: bytes = b"") -> bytes:
    while words not in said:
        assert select.select([process.terminal], [], [], DEADLINE)[0], said
        said += os.read(process.terminal, 4096)
    return said


def test_pause_to_zero_ends_all_processes_and_keeps_the_files(box):
    sh(box, "sleep 1000 > /dev/null 2>&1 & echo kept > /workspace/a")
    pid = os.pidfd_open(_agent_pid(box))
    snapshot = box.pause()
    assert snapshot is not None and snapshot.processes == 1
    assert box._machine is None and box.state is State.PAUSED
    signal_gone(pid)
    box.resume()
    assert box.read_file("/workspace/a") == b"kept\n"


def _agent_pid(box: Sandbox) -> int:
    """Process 1 of the guest, or the process that is its machine."""
    machine: Any = box._machine
    if not hasattr(machine, "_pidfd"):
        return machine.pids()[0]
    with open(f"/proc/self/fdinfo/{machine._pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def signal_gone(pidfd: int) -> None:
    """The process behind the descriptor has ended."""
    with contextlib.closing(open(pidfd)):
        assert select.select([pidfd], [], [], 0)[0]


def test_secrets_reach_their_command_only_and_no_snapshot(sandboxes, box, driver):
    secret = "s3cret-value-of-a-key"
    assert sh(box, "echo $KEY", secrets={"KEY": secret}).strip() == secret
    assert sh(box, "echo $KEY").strip() == ""
    fork = box.fork(1)[0]
    assert sh(fork, "echo $KEY", secrets={"KEY": "another-secret"}).strip() == "another-secret"
    # Of a file, across the border of two stored pieces.
    where = 65536 - 5 if sandboxes.driver(driver).contains == "files" else 100
    sh(box, f"head -c {where} /dev/urandom > /workspace/leak; printf '{secret}' >> /workspace/leak")
    with pytest.raises(SecretInSnapshot, match="(/workspace/leak|its memory) holds the secret KEY"):
        box.checkpoint()
    assert box.state is State.RUNNING
    sh(box, "rm /workspace/leak")
    snapshot = box.checkpoint()
    stored = b"".join(path.read_bytes() for path in sandboxes.home.store.root.rglob("*") if path.is_file())
    assert secret.encode() not in stored
    assert sandboxes.resume(snapshot.id).exec(["true"]).code == 0


def test_destroy_ends_everything_and_twice_is_once(sandboxes, box):
    sh(box, "sleep 1000 > /dev/null 2>&1 &")
    pid = os.pidfd_open(_agent_pid(box))
    box.destroy()
    box.destroy()
    signal_gone(pid)
    assert box.state is State.DEAD and sandboxes.home.records() == []
    with pytest.raises(TransitionError, match="is dead and cannot go to exec"):
        box.exec(["true"])


def test_a_guest_that_ends_under_a_command_is_lost_with_a_typed_error(sandboxes: Sandboxes, box, driver):
    execution = box.start(["sleep", "1000"])
    os.kill(_agent_pid(box), signal.SIGKILL)
    with pytest.raises(GuestLost):
        execution.result()
    assert box.state is State.DEAD
    assert sandboxes.create(driver=driver).exec(["true"]).code == 0


def test_a_named_sandbox_that_is_lost_is_reported_with_the_snapshot_that_is_left(sandboxes: Sandboxes, driver):
    box = sandboxes.create(driver=driver, name="named")
    sh(box, "echo saved > /workspace/a")
    snapshot = box.checkpoint()
    os.kill(_agent_pid(box), signal.SIGKILL)
    with pytest.raises(GuestLost):
        box.read_file("/workspace/a")
    assert [(record.name, record.state) for record in sandboxes.home.records()] == [("named", "lost")]
    with pytest.raises(SandboxError, match=f"named is lost.*{snapshot.id}"):
        sandboxes.open("named")
    assert sandboxes.resume(snapshot.id).read_file("/workspace/a") == b"saved\n"


def test_revert_goes_back_to_the_newest_snapshot(box):
    with pytest.raises(SandboxError, match="no snapshot to go back to"):
        box.revert()
    sh(box, "echo saved > /workspace/a")
    box.checkpoint()
    sh(box, "echo unsaved > /workspace/a")
    box.revert()
    assert box.state is State.PAUSED and box._machine is None
    box.resume()
    assert box.read_file("/workspace/a") == b"saved\n"
