"""A user without rights: sandboxes, pool and tracked sessions work, and what needs root is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTED_DRIVERS = ("proc",)
NOBODY = 65534
PYTHON = "/usr/bin/python3"
ROOT = Path(__file__).resolve().parents[2]

WORK = """
import json, sys
from pathlib import Path
from perilune.sandbox import Limits, Pool, PoolLimits, PythonSession, Sandboxes, Spec
sandboxes = Sandboxes(Path(sys.argv[1]), sync="none")
probe = sandboxes.probe("proc")
assert probe.passed, probe.reason
with Pool(sandboxes, PoolLimits(tick_seconds=3600)) as pool:
    box = pool.create(Spec(limits=Limits(memory_bytes=1 << 30, disk_bytes=64 << 20)), name="mine")
    session = PythonSession(box, arena_bytes=16 << 20)
    session.run("b = arena.block('b', 4 << 20); b[:] = b'x' * len(b); b[5] = 7")
    box.checkpoint()
    session.run("b[6] = 8")
    fork = pool.fork("mine", 1)[0]
    again = PythonSession(fork, arena_bytes=16 << 20)
    value = again.run("b = arena.block('b'); (b[5], b[6], len(b))").value
    again.close()
    session.close()
    pool.reaper.tick()
    memory = pool.usage().memory
    while fork.unsaved_processes():
        pass
    parked = pool.park(pool.entry(fork.id), 0.0)
    with pool.use(fork.id) as woken:
        woken_files = sorted(entry.name for entry in woken.list("/dev/shm/arena"))
    print(json.dumps({
        "guarantees": {one.name: one.held for one in probe.guarantees}, "value": value, "tracked": session.tracked,
        "memory": memory.total, "exact": memory.exact, "parked": parked, "files": woken_files,
    }))
"""


def test_everything_works_without_rights_and_what_needs_root_is_said(driver, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("the other tests run without rights here already")
    version = subprocess.run([PYTHON, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
    if not os.path.exists(PYTHON) or version.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("needs a Python of this version that every user may run")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    reach = subprocess.run(
        ["test", "-r", f"{ROOT}/perilune/__init__.py", "-a", "-r", packages], user=NOBODY, group=NOBODY
    )
    if reach.returncode:
        pytest.skip("another user may not read this checkout")
    home = tmp_path / "home"
    home.mkdir()
    for folder in (home, *(path for path in home.parents if path.is_relative_to("/tmp"))):
        folder.chmod(0o755 if folder != home else 0o700)
    os.chown(home, NOBODY, NOBODY)
    done = subprocess.run(
        [PYTHON, "-c", WORK, str(home)], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, timeout=120, cwd="/",
        env={"PATH": "/usr/bin:/bin", "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": f"{ROOT}:{packages}"},
    )  # fmt: skip
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"user namespaces are not for everybody here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["value"] == f"(7, 8, {4 << 20})" and told["parked"] and told["files"] == ["heap", "heap.map", "session"]
    held = told["guarantees"]
    assert (
        held["isolation"] and held["network"] and held["unprivileged"] and held["process limit"] and held["disk limit"]
    )
    assert not held["changes to /usr"] and told["memory"] > 0
