"""Programs that mean harm: the host, the siblings and the sandbox's own agent stay well, and each ends in a typed result."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

import perilune
from perilune.errors import SandboxError
from perilune.sandbox import Limits, Sandbox, Sandboxes, Spec
from perilune.sandbox.guest import seccomp
from perilune.sandbox.protocol import CHANGES

TESTED_DRIVERS = ("proc",)

TIGHT = Limits(
    memory_bytes=96 << 20,
    disk_bytes=16 << 20,
    processes=24,
    output_bytes=1 << 16,
    exec_seconds=60,
    cpus=1.0,
    open_files=256,
)


@pytest.fixture
def hostile(sandboxes: Sandboxes, driver: str) -> Sandbox:
    return sandboxes.create(Spec(limits=TIGHT, trees=(sys.base_prefix,)), driver=driver)


@pytest.fixture
def sibling(sandboxes: Sandboxes, driver: str):
    made = sandboxes.create(Spec(limits=TIGHT), driver=driver)
    yield made
    assert made.exec(["echo", "well"]).stdout == b"well\n", "the sibling suffered"


def python_run(box: Sandbox, python: str, source: str, **options):
    return box.exec([python, "-S", "-c", source], **options)


def held(box: Sandbox, name: str) -> bool:
    """Whether the driver promises this here; where it does not it says why, and the test is not about it."""
    assert box._machine is not None
    guarantee = next(found for found in box._machine.guarantees if found.name == name)
    if not guarantee.held:
        pytest.skip(f"{name}: {guarantee.how}")
    return True


def test_fork_bomb(hostile, sibling):
    held(hostile, "process limit")
    result = hostile.exec(["sh", "-c", "f() { f | f & }; f; while :; do f; done"], timeout=1.0)
    assert result.timed_out or result.code != 0
    # What left the command's session is the guest's business; it stays within the limit and the sandbox can be used or ended.
    hostile.destroy()


def test_a_process_that_forks_without_end_is_ended_by_the_timeout(hostile, python, sibling):
    source = "import os\nwhile True:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass"
    assert python_run(hostile, python, source, timeout=0.5).code in (0, 137)
    assert hostile.exec(["echo", "still here"], timeout=30).stdout == b"still here\n"


def test_memory_bomb(hostile, python, sibling):
    result = python_run(hostile, python, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert result.code != 0
    if held(hostile, "memory limit"):
        assert result.out_of_memory and result.signal == 9
    assert hostile.exec(["echo", "still here"]).stdout == b"still here\n"


def test_disk_filler(hostile, sibling):
    # Several files, for one alone would meet the limit of a file's size.
    script = "for i in 1 2 3 4 5 6 7 8; do head -c 4000000 /dev/zero | tr '\\0' x > /workspace/f$i || exit 1; done"
    result = hostile.exec(["sh", "-c", script])
    assert result.code != 0 and b"No space left" in result.stderr
    assert hostile.exec(["sh", "-c", "rm /workspace/f*; echo fits > /workspace/again"]).code == 0
    full = hostile.exec(["sh", "-c", "head -c 30000000 /dev/zero > /dev/shm/x; head -c 30000000 /dev/zero > /tmp/x"])
    assert full.code != 0


def test_inode_filler_leaves_a_sandbox_that_can_be_saved(hostile):
    script = "i=0; while [ $i -lt 3000 ]; do : > /workspace/$i; i=$((i+1)); done"
    assert hostile.exec(["sh", "-c", script]).code == 0
    assert hostile.checkpoint().entries >= 3000


def test_folders_without_end_are_refused_by_a_checkpoint_and_nothing_is_lost(hostile, python):
    source = "import os\nos.chdir('/workspace')\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    assert python_run(hostile, python, source).code == 0
    with pytest.raises(SandboxError, match="folders deeper than 200"):
        hostile.checkpoint()
    assert hostile.exec(["sh", "-c", "rm -r /workspace/d && echo mended > /workspace/a"]).code == 0
    assert hostile.fork(1)[0].read_file("/workspace/a") == b"mended\n"


def test_endless_output(hostile, sibling, count):
    size = count(full=1_000_000_000, reduced=50_000_000)
    result = hostile.exec(["head", "-c", str(size), "/dev/zero"])
    assert (result.code, result.stdout_bytes, len(result.stdout), result.truncated) == (0, size, 1 << 16, True)
    endless = hostile.exec(["sh", "-c", "trap '' TERM PIPE; yes >&2"], timeout=0.3)
    assert endless.timed_out and endless.stderr_bytes > 1 << 16


def test_links_out_of_the_root_lead_into_it(hostile, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("host")
    links = f"ln -s {outside} /workspace/a; ln -s ../../../../../..{outside} /workspace/b; ln -s / /workspace/root; ln -s /proc/1/root /workspace/c"
    assert hostile.exec(["sh", "-c", links]).code == 0
    for path in (
        "/workspace/a",
        "/workspace/b",
        f"/workspace/root{outside}",
        f"/workspace/c{outside}",
        f"/proc/1/cwd{outside}",
    ):
        assert hostile.exec(["cat", path]).code != 0
        with pytest.raises(Exception, match="No such file|denied"):
            hostile.read_file(path)
    hostile.write_file("/workspace/a", b"guest")
    assert outside.read_text() == "host"
    assert hostile.exec(["cat", str(outside)]).stdout == b"guest"


@pytest.mark.parametrize("changes", CHANGES)
def test_a_link_saved_where_a_tree_is_mounted_leads_no_restore_to_the_host(sandboxes, driver, tmp_path, changes):
    """The folder above a mount can be renamed; whoever restores it must not follow the link that took its place."""
    tree, outside = tmp_path / "above/tree", tmp_path / "outside"
    tree.mkdir(parents=True)
    outside.mkdir()
    box = sandboxes.create(Spec(limits=TIGHT, trees=(str(tree),), changes=changes), driver=driver)
    script = f"mv {tree.parent} {tree.parent}.old && ln -s {outside} {tree.parent}; rmdir /workspace; ln -s {outside} /workspace"
    assert box.exec(["sh", "-c", script], cwd="/").code == 0
    snapshot = box.checkpoint()
    with pytest.raises(SandboxError, match="is no folder, and .* must be mounted there"):
        sandboxes.resume(snapshot.id)
    assert list(outside.iterdir()) == [] and box.exec(["true"], cwd="/").code == 0


def test_the_hosts_files_are_not_there(hostile):
    for path in ("/etc/shadow", "/etc/ssh", f"{os.path.expanduser('~')}/.ssh", "/boot", "/sys/kernel", "/var/lib"):
        assert hostile.exec(["ls", path]).code != 0, path
    done = hostile.exec(["sh", "-c", "rm -rf /etc/* && rm /usr/bin/env && ! test -e /usr/bin/env"])
    assert hostile.list("/etc") == []
    # Root's guests may change their view of the host's programs; other users' may not even that.
    assert done.code == 0 if os.geteuid() == 0 else b"denied" in done.stderr
    assert os.path.exists("/usr/bin/env") and os.path.exists("/etc/passwd")


def test_the_kernels_knobs_are_read_only(hostile):
    knobs = ("/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger",
             "/proc/sys/user/max_user_namespaces")  # fmt: skip
    for knob in knobs:
        before = open(knob).read() if os.access(knob, os.R_OK) and "sysrq" not in knob and "drop" not in knob else None
        done = hostile.exec(["sh", "-c", f"echo 1 > {knob}"])
        # What is hidden is /dev/null there, which takes anything.
        assert done.code != 0 or hostile.exec(["sh", "-c", f"test -c {knob}"]).code == 0, knob
        if before is not None:
            assert open(knob).read() == before
    assert hostile.exec(["cat", "/proc/kcore"]).stdout == b""
    assert hostile.exec(["sh", "-c", "mknod /workspace/disk b 254 0"]).code != 0


REFUSED = r"""
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, result, *allowed):
    code = ctypes.get_errno()
    if result >= 0 or code not in (errno.EPERM, *allowed): print(name, result, errno.errorcode.get(code))
refused('mount', libc.mount(b'none', b'/mnt', b'tmpfs', 0, None))
refused('remount', libc.mount(b'none', b'/proc/sys', None, 32 | 4096, None))
refused('umount', libc.umount2(b'/proc/sys', 2))
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
    refused(f'unshare {flag:#x}', libc.unshare(flag))
refused('clone', libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | 17, 0, 0, 0, 0))
refused('clone3', libc.syscall(435, 0, 0), errno.ENOSYS)
refused('setns', libc.setns(0, 0))
refused('chroot', libc.chroot(b'/workspace'))
refused('keyctl', libc.syscall(250 if os.uname().machine == 'x86_64' else 219, 0, 0, 0))
refused('bpf', libc.syscall(321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0))
refused('io_uring', libc.syscall(425, 1, 0))
refused('vsock', libc.socket(40, 1, 0)); refused('packet', libc.socket(17, 3, 0)); refused('alg', libc.socket(38, 5, 0))
refused('tiocsti', libc.ioctl(0, 0x5412, b'x'))
refused('ptrace', libc.ptrace(16, 1, None, None)); refused('sethostname', libc.sethostname(b'x', 1))
for path in ('/proc/1/mem', '/proc/1/environ', '/proc/1/root/etc', '/proc/1/fd/3', '/proc/1/cwd/x'):
    try: os.stat(path) if 'mem' not in path and 'environ' not in path else open(path, 'rb').read(1); print('open', path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM): print(path, error)
for number in (9, 19, 15, 10): os.kill(1, number)
print('done')
"""


def test_system_calls_that_reach_out_are_refused(hostile, python):
    assert hostile._machine is not None
    filtered = next(found for found in hostile._machine.guarantees if found.name == "system calls")
    assert filtered.held == (os.uname().machine in seccomp.ARCHITECTURES)
    if not filtered.held:
        pytest.skip(filtered.how)
    result = python_run(hostile, python, REFUSED)
    assert (result.stdout, result.code) == (b"done\n", 0), result
    assert hostile.exec(["echo", "alive"]).stdout == b"alive\n"


def test_no_network_reaches_the_host(hostile, python):
    """The server is this test's own, on the host's loopback; the guest has a loopback of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = (
            f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 2); print('reached')\n"
            "except OSError as e: print('refused', e.errno)\n"
            "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "try: s.sendto(b'x', ('192.0.2.1', 9)); print('sent')\nexcept OSError as e: print('unreachable', e.errno)\n"
            "print(sorted(name for _, name in socket.if_nameindex() if name == 'lo'))"
        )
        lines = python_run(hostile, python, source).stdout.decode().splitlines()
        assert lines[0].startswith("refused") and lines[1].startswith("unreachable") and lines[2] == "['lo']"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_an_abstract_socket_of_the_host_is_not_seen(hostile, python):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0perilune-test-{os.getpid()}")
        server.listen()
        source = (
            f"import socket\ntry: socket.socket(socket.AF_UNIX).connect('\\0perilune-test-{os.getpid()}'); print('reached')\n"
            "except OSError: print('refused')"
        )
        assert python_run(hostile, python, source).stdout == b"refused\n"


def test_a_module_planted_in_the_guest_is_not_imported_by_its_agent(hostile, python):
    """The agent's interpreter would look here; it must import nothing once the root is the guest's."""
    plant = (
        f"import os, sys\nfor folder in ('{Path(perilune.__file__).parents[1]}', '/workspace', '/', '/usr/lib/python3', *sys.path):\n"
        "  for name in ('traceback', 'encodings/idna', 'stringprep', 'shutil', 'tempfile', 'perilune'):\n"
        "    path = folder + '/' + name + '.py'\n"
        "    try:\n      os.makedirs(os.path.dirname(path), exist_ok=True); open(path, 'w').write(\"open('/workspace/PLANTED', 'w')\\n\")\n"
        "    except OSError: pass"
    )
    python_run(hostile, python, plant)
    hostile.exec(["true"])
    hostile.write_file("/workspace/a", b"x")
    with pytest.raises(Exception):  # noqa: B017 - any typed error; what counts is what ran.
        hostile.connect(1)
    hostile.checkpoint()
    assert "PLANTED" not in [entry.name for entry in hostile.list("/workspace")]


def test_stopping_itself_and_hiding_from_a_freeze(sandboxes, driver, python):
    """A process stopped before a checkpoint stays stopped after it; threads and vfork children are caught too."""
    # Threads reserve much address space, which is what is limited where there is no control group.
    hostile = sandboxes.create(Spec(limits=Limits(processes=64), trees=(sys.base_prefix,)), driver=driver)
    source = (
        "import os, signal, threading, subprocess\n"
        "pid = os.fork()\nif pid == 0:\n  os.kill(os.getpid(), signal.SIGSTOP); os._exit(0)\n"
        "os.waitpid(pid, os.WUNTRACED)\n"
        "for _ in range(4): threading.Thread(target=lambda: [subprocess.run(['true']) for _ in range(10**9)], daemon=True).start()\n"
        "print(pid, flush=True); os.read(0, 1)"
    )
    read, write = os.pipe()
    execution = hostile.start([python, "-S", "-c", source], stdin=read)
    first = next(iter(execution))
    assert first.stream == "stdout", first
    pid = first.data.decode().strip()
    for _ in range(3):
        hostile.checkpoint()
    state = hostile.exec(["sh", "-c", f"cut -d' ' -f3 /proc/{pid}/stat"])
    execution.kill()
    execution.result()
    os.close(read)
    os.close(write)
    assert state.stdout == b"T\n", state
