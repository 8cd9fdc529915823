"""`perilune sandbox` as a user runs it: streams, exit codes, kept sandboxes between commands, messages."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perilune.cli.main import main
from perilune.sandbox import Sandboxes, drivers
from perilune.sandbox.drivers.proc_process import set_window
from perilune.sandbox.pool import Pool

TESTED_DRIVERS = ("proc",)

pytestmark = pytest.mark.usefixtures("driver")


@pytest.fixture
def cli(home: Path):
    """In a process of its own, as a shell starts it; `command` does the same in this one."""

    def call(*args: str, stdin: bytes | None = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "perilune", "sandbox", *args], input=stdin, capture_output=True, timeout=120,
            env={**os.environ, "PERILUNE_SANDBOX_HOME": str(home)},
        )  # fmt: skip

    return call


def told(done: subprocess.CompletedProcess[bytes]) -> dict:
    return json.loads(done.stdout)


def test_run_passes_streams_input_and_exit_code(cli):
    done = cli("run", "--", "sh", "-c", "tr a-z A-Z; echo err >&2; exit 9", stdin=b"in\xffput")
    assert (done.stdout, done.stderr, done.returncode) == (b"IN\xffPUT", b"err\n", 9)


def test_run_says_why_it_ended_a_program(command):
    late = command("run", "--timeout", "0.2", "--", "sleep", "100")
    assert (late.returncode, late.stdout, late.stderr) == (124, b"", b"perilune: killed: its time was over\n")
    assert command("run", "--", "no-such-program").returncode == 127


def test_run_json_is_one_object_with_what_the_driver_promises(command):
    done = command("run", "--json", "--", "sh", "-c", "printf '\\377'; echo err >&2; exit 3")
    result = told(done)
    assert (result["code"], result["stderr"], result["stdout_base64"], result["driver"]) == (3, "err\n", "/w==", "proc")
    assert done.returncode == 3 and done.stderr == b"" and not result["kept"]
    assert {"name", "held", "how"} == set(result["guarantees"][0])


def test_kept_sandboxes_go_on_fork_and_end(command, home):
    kept = command("run", "--name", "job", "--", "sh", "-c", "echo 1 > /workspace/n")
    assert (kept.returncode, kept.stdout, kept.stderr) == (0, b"", b"kept: job\n")
    assert command("resume", "job", "--", "sh", "-c", "echo 2 >> /workspace/n; cat /workspace/n").stdout == b"1\n2\n"
    snapshot = command("snapshot", "job").stdout.decode().strip()
    assert command("fork", "job", "-n", "2").stdout == b"job-1\njob-2\n"
    assert command("resume", "job-1", "--", "sh", "-c", "echo fork > /workspace/n").returncode == 0
    assert command("resume", "job-2", "--", "cat", "/workspace/n").stdout == b"1\n2\n"
    listed = told(command("ps", "--json"))
    assert {entry["name"]: entry["state"] for entry in listed["sandboxes"]} == dict.fromkeys(
        ("job", "job-1", "job-2"), "paused"
    )
    assert len(listed["snapshots"]) == 4, "one a sandbox and the one of its own: those before were replaced"
    table = command("ps").stdout.decode()
    assert "job-2" in table and snapshot in table
    assert command("rm", "job", "job-1", "job-2").returncode == 0
    assert command("resume", snapshot, "--", "cat", "/workspace/n").stdout == b"1\n2\n"
    removed = told(command("rm", snapshot, "--json"))
    assert removed["removed"] == [snapshot] and removed["freed_bytes"] > 0
    left = told(command("ps", "--json"))
    assert (left["sandboxes"], left["snapshots"], left["store_bytes"]) == ([], [], 0)


def test_a_secret_comes_from_the_environment_and_is_not_kept(command):
    secret = {"API_KEY": "sk-very-secret-value"}
    used = command(
        "run",
        "--secret",
        "API_KEY",
        "--name",
        "a",
        "--",
        "sh",
        "-c",
        "echo $API_KEY | wc -c; touch /workspace/saved",
        env=secret,
    )
    assert used.stdout == b"21\n" and used.returncode == 0
    assert command("resume", "a", "--", "sh", "-c", "echo -$API_KEY-").stdout == b"--\n"
    leak = command(
        "resume", "a", "--secret", "API_KEY", "--", "sh", "-c", "echo $API_KEY > /workspace/leak", env=secret
    )
    assert leak.returncode == 1 and b"/workspace/leak holds the secret API_KEY" in leak.stderr
    assert command("resume", "a", "--", "ls", "/workspace").stdout == b"saved\n", "what was kept before is still kept"
    missing = command("run", "--secret", "NOT_SET", "--", "true")
    assert missing.returncode == 2 and b"NOT_SET" in missing.stderr


def test_doctor_prints_what_is_promised_and_what_is_not(command, monkeypatch):
    # The page's commands have it look at all of them.
    monkeypatch.setattr(drivers, "DRIVERS", {name: drivers.DRIVERS[name] for name in ("proc", "firecracker")})
    done = command("doctor")
    text = done.stdout.decode()
    assert done.returncode == 0
    assert "proc: works: ran programs" in text and "\nfirecracker: " in text and "no problems" in text
    assert any(line.split()[:2] == ["no", "guest"] for line in text.splitlines())
    report = told(command("doctor", "--json"))
    assert report["drivers"][0]["passed"] and report["store"]["problems"] == []
    assert report["drivers"][0]["capabilities"]["snapshot"] == "files"


@pytest.mark.parametrize(
    "args, code, words",
    [
        ((), 2, b"usage: perilune sandbox"),
        (("start",), 2, b"'start' is not one of run, shell"),
        (("run",), 2, b"needs a program behind --"),
        (("run", "ls"), 2, b"The program goes behind --"),
        (("run", "--memory", "lots", "--", "ls"), 2, b"'lots' is no size"),
        (("run", "--disk", "2G", "--", "ls"), 2, b"changed files live in memory"),
        (("run", "--image", "/nowhere", "--", "ls"), 2, b"'/nowhere' is not a folder"),
        (("run", "--tree", "/etc", "--", "ls"), 2, b"would show the host's own /etc"),
        (("run", "--network", "some", "--", "ls"), 2, b"none, host"),
        (("run", "--env", "A", "--", "ls"), 2, b"NAME=VALUE"),
        (("run", "--cpus", "inf", "--", "ls"), 2, b"cpus=inf must be above zero and at most"),
        (("run", "--processes", "9" * 30, "--", "ls"), 2, b"at most 4,194,304"),
        (("run", "--timeout", "nan", "--", "ls"), 2, b"exec_seconds=nan must be above zero"),
        (("run", "--driver", "", "--", "ls"), 2, b"driver '' is not one of"),
        (("run", "--image", "", "--", "ls"), 2, b"template='' and trees=[] must not be empty"),
        (("run", "--", ""), 2, b"needs a program's name"),
        (("fork", "nothing", "-n", "65"), 2, b"1 to 64 copies"),
        (("resume", "nothing", "--", "ls"), 1, b"no sandbox 'nothing'"),
        (("resume", "snap-0123", "--", "ls"), 1, b"no snapshot 'snap-0123'"),
        (("resume", "snap-0123", "--memory", "1G", "--", "ls"), 2, b"--memory is decided when a sandbox is made"),
        (("snapshot",), 2, b"needs one name or snapshot"),
        (("rm",), 2, b"needs names"),
        (("shell",), 2, b"needs a terminal"),
        (("ps", "job"), 2, b"takes no name"),
        (("rm", "job", "--", "ls"), 2, b"runs no program"),
        (("run", "--frobnicate"), 2, b"frobnicate"),
    ],
)
def test_mistakes_are_told(home, monkeypatch, capsys, args, code, words):
    monkeypatch.setenv("PERILUNE_SANDBOX_HOME", str(home))
    monkeypatch.setattr(sys, "stdin", None)  # Closed, as a shell does it with <&-.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(["sandbox", *args]) == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr()
    assert words in said.err.encode() and said.out == ""


def test_help_goes_to_stdout(cli):
    done = cli("--help")
    assert done.returncode == 0 and done.stdout.startswith(b"usage: perilune sandbox") and done.stderr == b""


def test_an_image_folder_and_a_tree(command, tmp_path):
    image, tree = tmp_path / "image", tmp_path / "tree,with:odd name"
    for name in ("usr", "bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (image / name).parent.mkdir(exist_ok=True)
            (image / name).symlink_to(os.readlink(f"/{name}"))
    (image / "etc").mkdir(parents=True)
    (image / "etc/motd").write_text("image\n")
    tree.mkdir()
    (tree / "data").write_text("tree\n")
    script = f"cat /etc/motd '{tree}/data'; echo x > '{tree}/data'; echo y > /etc/motd; ls /etc"
    done = command(
        "run", "--image", str(image), "--tree", "/usr", "--tree", str(tree), "--", "/usr/bin/env", "sh", "-c", script
    )
    assert (done.stdout, done.stderr) == (b"image\ntree\nmotd\n", b"")
    assert (tree / "data").read_text() == "tree\n" and (image / "etc/motd").read_text() == "image\n"


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stopped_run_leaves_nothing(command, home, ending, code):
    process = subprocess.Popen(
        [sys.executable, "-m", "perilune", "sandbox", "run", "--", "sh", "-c", "echo up; sleep 1000"],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env={**os.environ, "PERILUNE_SANDBOX_HOME": str(home)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(ending)
    assert process.wait(60) == code
    assert told(command("ps", "--json"))["sandboxes"] == []


def test_a_killed_run_is_listed_as_lost_and_removed_on_demand(cli, home):
    process = subprocess.Popen(
        [sys.executable, "-m", "perilune", "sandbox", "run", "--name", "job", "--", "sh", "-c", "echo up; sleep 1000"],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env={**os.environ, "PERILUNE_SANDBOX_HOME": str(home)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    busy = cli("rm", "job")
    assert busy.returncode == 1 and f"in use by process {process.pid}".encode() in busy.stderr
    process.kill()
    process.wait(60)
    assert [(entry["name"], entry["state"]) for entry in told(cli("ps", "--json"))["sandboxes"]] == [("job", "lost")]
    gone = cli("resume", "job", "--", "true")
    assert gone.returncode == 1 and b"job is lost" in gone.stderr
    assert told(cli("rm", "--lost", "--json"))["removed"] == ["job"]
    assert told(cli("ps", "--json"))["sandboxes"] == []


@pytest.mark.parametrize("where", ["here", "service"])
def test_shell_is_a_terminal_in_the_sandbox_and_its_window_has_the_users_size(home, monkeypatch, where):
    monkeypatch.setenv("PERILUNE_SANDBOX_HOME", str(home))
    with contextlib.ExitStack() as stack:
        if where == "service":
            api = pytest.importorskip("perilune.sandbox.api", reason="the extra 'serve' is not installed")
            pool = stack.enter_context(Pool(Sandboxes(home, sync="none")))
            monkeypatch.setenv("PERILUNE_SANDBOX_URL", stack.enter_context(api.serve_in_thread(pool)).url)
        _use_a_shell()
        done = subprocess.run(
            [sys.executable, "-m", "perilune", "sandbox", "resume", "sh", "--", "cat", "/workspace/n"],
            capture_output=True, stdin=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip
        assert done.stdout == b"42\n"


def _use_a_shell() -> None:
    """Start one as a user does, on a terminal whose window changes its size meanwhile."""
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "perilune", "sandbox", "shell", "--name", "sh"])
    seen = b""

    def until(words: bytes) -> None:
        nonlocal seen
        while words not in seen:
            assert select.select([master], [], [], 60)[0], seen
            try:
                seen += os.read(master, 4096)
            except OSError:
                break
        assert words in seen, seen

    until(b"# ")
    os.write(master, b"tty; echo $((6*7)) > /workspace/n\n")
    until(b"/dev/pts/0")
    set_window(master, 41, 123)
    os.write(master, b"until test \"$(stty size)\" = '41 123'; do :; done; echo resi''zed; exit 5\n")
    until(b"resized")
    until(b"kept: sh")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    os.close(master)


def test_a_machine_that_refuses_namespaces_is_told_which_call_it_was(home):
    """In a user namespace that allows none inside of it: what a locked-down container is like."""
    script = (
        "import os, sys\nfrom perilune.sandbox.guest import linux\nuid, gid = os.getuid(), os.getgid()\nlinux.unshare(linux.CLONE_NEWUSER)\n"
        "open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')\nopen('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "from perilune.sandbox import drivers\ndrivers.DRIVERS = {'proc': drivers.DRIVERS['proc']}\n"
        "from perilune.cli.main import main\nsys.exit(main(['sandbox', *sys.argv[1:]]))"
    )
    for args in (["run", "--", "true"], ["doctor"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
            env={**os.environ, "PERILUNE_SANDBOX_HOME": str(home)},
        )  # fmt: skip
        assert done.returncode == 1 and "unshare(0x10000000)" in done.stdout + done.stderr, done
        assert "Traceback" not in done.stderr


def test_steps_of_a_trajectory_go_on_only_where_everything_fits(command, tmp_path):
    def versions(**changes) -> str:
        path = tmp_path / "versions.json"
        path.write_text(json.dumps({"weights": "w7", "template": "t1", "prefix": [], "tokens": [1, 2], **changes}))
        return str(path)

    first = command(
        "step", "task", "--versions", versions(), "--", "sh", "-c", "echo 1 > /workspace/n; echo said; exit 3"
    )
    assert (first.returncode, first.stdout) == (3, b"said\n") and first.stderr.startswith(b"task: step 0, snap-")
    second = told(
        command(
            "step",
            "task",
            "--json",
            "--versions",
            versions(prefix=[1, 2], tokens=[1, 2, 3]),
            "--",
            "cat",
            "/workspace/n",
        )
    )
    assert (
        second["result"]["stdout"] == "1\n"
        and second["manifest"]["step"] == 1
        and second["manifest"]["parent"] == "task/0"
    )
    for changes, field in (
        ({"weights": "w8"}, "weights"),
        ({"harness": "h"}, "harness"),
        ({"prefix": [1, 2]}, "token_prefix_hash"),
    ):
        given = versions(**{"prefix": [1, 2, 3], **changes})
        refused = command("step", "task", "--versions", given, "--", "touch", "/workspace/never")
        assert refused.returncode == 1 and f"{field} differs".encode() in refused.stderr and refused.stdout == b"", (
            field
        )
    listed = command("step", "task", "--versions", versions(prefix=[1, 2, 3], tokens=[9]), "--", "ls", "/workspace")
    assert listed.stdout == b"n\n"
    bad = tmp_path / "bad.json"
    bad.write_text('{"weight": 1}')
    assert b"unknown keys ['weight']" in command("step", "task", "--versions", str(bad), "--", "true").stderr
    assert told(command("ps", "--json"))["sandboxes"] == []
