"""Guests that try to reach a host: one that this test makes, in a network namespace of its own, with the sandboxes' owner beside it.

The same attempts with the network policy "host" do reach it: they would be seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TESTED_DRIVERS = ("proc", "qemu")

OWNER = r"""
import fcntl, json, os, select, socket, struct, sys
from pathlib import Path
from perilune.sandbox import Limits, Sandboxes, Spec
from perilune.sandbox.guest import linux

uid, gid = os.getuid(), os.getgid()
linux.unshare(linux.CLONE_NEWNET | (linux.CLONE_NEWUSER if uid else 0))
if uid:
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
HOST = "198.51.100.7"  # Of a range that is nobody's.

def interface(name, request, value):
    with socket.socket() as sock:
        fcntl.ioctl(sock, request, struct.pack("16s", name.encode()) + value)

interface("lo:1", 0x8916, struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(HOST)))  # SIOCSIFADDR
interface("lo", 0x8914, struct.pack("H14x", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running

home, driver, argv, specs = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
stream, datagrams = socket.create_server((HOST, 8123)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind((HOST, 8124))
told = {}
with Sandboxes(home, sync="none") as sandboxes:
    for network, values in specs.items():
        box = sandboxes.create(Spec(network=network, trees=tuple(values["trees"]), limits=Limits(**values["limits"])), driver=driver)
        result = box.exec(argv, timeout=60)
        reached = []
        for kind, sock in (("stream", stream), ("datagrams", datagrams)):
            while select.select([sock], [], [], 0)[0]:
                reached.append(kind)
                sock.accept()[0].close() if kind == "stream" else sock.recv(100)
        alive = box.exec(["echo", "well"]).stdout.decode()
        told[network] = {"reached": sorted(set(reached)), "said": result.stdout.decode(), "errors": result.stderr.decode(), "code": result.code, "alive": alive}
print(json.dumps(told))
"""
PYTHON = r"""
import socket
def attempt(name, function):
    try:
        function()
    except OSError as error:
        print(name, 'refused', error.errno)
    else:
        print(name, 'done')
attempt('stream', lambda: socket.create_connection(('198.51.100.7', 8123), 5))
attempt('datagrams', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('198.51.100.7', 8124)))
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
attempt('six', lambda: socket.create_connection(('2001:db8::7', 8123), 5))
"""
SHELL = r"""
nc -w 5 198.51.100.7 8123 < /dev/null && echo stream done
echo x | nc -u -w 1 198.51.100.7 8124 && echo datagrams done
wget -q -T 5 -O - http://198.51.100.7:8123/ && echo wget done
ls /sys/class/net
true
"""


def attempted(home, driver: str, argv: list[str], specs: dict) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", OWNER, str(home), driver, json.dumps(argv), json.dumps(specs)],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    if done.returncode and "unshare(" in done.stderr:
        pytest.skip(f"no network namespace of one's own here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_host_in_a_namespace_is_reached_by_nobody_who_may_not(driver, home, spec):
    if driver == "qemu":
        limits = {"memory_bytes": spec.limits.memory_bytes, "disk_bytes": spec.limits.disk_bytes}
        told = attempted(home, driver, ["sh", "-c", SHELL], {"none": {"trees": [], "limits": limits}})
        # The machine has no device: nothing but the loopback is there, whatever its root does.
        assert "done" not in told["none"]["said"] and told["none"]["said"].split() == ["lo"], told
    else:
        one = {"trees": [sys.base_prefix], "limits": {"memory_bytes": 256 << 20, "disk_bytes": 16 << 20}}
        argv = [os.path.realpath(f"{sys.base_prefix}/bin/python3"), "-S", "-c", PYTHON]
        told = attempted(home, driver, argv, {"none": one, "host": one})
        said = dict(line.split(" ", 1) for line in told["none"]["said"].splitlines())
        assert len(said) == 5 and all(words.startswith("refused") for words in said.values()), told
        assert told["host"]["reached"] == ["datagrams", "stream"] and told["host"]["alive"] == "well\n", told
        # Even with the host's network no guest makes packets of its own.
        assert "raw refused" in told["host"]["said"] and "packet refused" in told["host"]["said"], told
    assert told["none"]["reached"] == [] and told["none"]["alive"] == "well\n", told
