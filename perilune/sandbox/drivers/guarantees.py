"""What the drivers promise for one sandbox on this machine, and by what."""

from __future__ import annotations

import os

from perilune.sandbox.drivers.cgroup import Group
from perilune.sandbox.protocol import Guarantee, Spec


def guarantees(group: Group, spec: Spec, filtered: bool, changes: str) -> tuple[Guarantee, ...]:
    """One line for each promise, held or not.

    Args:
        filtered: a system-call filter is installed.
        changes: where changed files are, "memory" or "disk".
    """
    limits, root = spec.limits, os.geteuid() == 0

    def limited(controller: str, otherwise: tuple[bool, str]) -> tuple[bool, str]:
        return (True, group.held[controller]) if controller in group.held else otherwise

    missing = group.missing
    memory = limited("memory", (False, f"address space of each process only; {missing.get('memory')}"))
    pids = limited(
        "pids",
        (not root, f"not for root's guests; {missing.get('pids')}" if root else "RLIMIT_NPROC of its user namespace"),
    )
    cpu = limited("cpu", (False, str(missing.get("cpu"))))
    disk = f"{limits.disk_bytes} bytes: size of the tmpfs that holds changed files"
    if changes != "memory":
        why = (
            "as asked for"
            if spec.changes == "disk"
            else "this kernel's tmpfs keeps no user attributes (Linux 6.6 does)"
        )
        disk = f"{limits.disk_bytes} bytes for each changed file only; they are on disk, {why}"
    own_network = spec.network == "none"
    return (
        Guarantee("isolation", True, "own user, process, mount, IPC, UTS and cgroup namespaces; the kernel is the host's"),
        Guarantee("guest kernel", False, "the host's kernel runs the guest"),
        Guarantee("unprivileged", not root, "guest root is root outside but for its namespaces, dropped capabilities and filter"
                  if root else "guest root is the calling user outside"),
        Guarantee("network", own_network, "own network namespace, loopback only" if own_network else "shares the host's network"),
        Guarantee("system calls", filtered, "seccomp filter" if filtered else "no filter for this processor"),
        Guarantee("memory limit", memory[0], f"{limits.memory_bytes} bytes: {memory[1]}"),
        Guarantee("process limit", pids[0], f"{limits.processes}: {pids[1]}"),
        Guarantee("processor limit", cpu[0], f"{limits.cpus:g}: {cpu[1]}"),
        Guarantee("disk limit", changes == "memory", disk),
        Guarantee(
            "changes to /usr",
            root,
            "the guest may change its view of programs that belong to root"
            if root
            else "files that belong to the host's root are read-only for guests of other users; /workspace, /root, /etc, /tmp and /opt are not",
        ),
        Guarantee("no orphans", True, "the kernel ends all processes with their owner"),
        Guarantee("memory snapshot", False, "snapshots hold files; no process is saved, but the state of a PythonSession is"),
    )  # fmt: skip


def machine_guarantees(group: Group, spec: Spec, accelerator: str, memory: int) -> tuple[Guarantee, ...]:
    """The same for a virtual machine.

    Args:
        group: of the process that runs it.
        accelerator: "tcg" or "kvm".
        memory: bytes of the guest.
    """
    limits = spec.limits
    how = "emulated in software" if accelerator == "tcg" else "on the processor's virtualisation"
    return (
        Guarantee("isolation", True, f"virtual machine, {how}; its monitor is behind a system-call filter"),
        Guarantee("guest kernel", True, "the guest has a kernel of its own and may mount, load modules, or break it"),
        Guarantee("unprivileged", os.geteuid() != 0, "the monitor runs as the calling user"),
        Guarantee("network", True, "no network device; loopback only"),
        Guarantee("memory limit", True, f"{memory} bytes: all the memory that the guest has"),
        Guarantee(
            "process limit", True, f"{limits.processes}: control group inside of the guest, whose root may change it"
        ),
        Guarantee(
            "processor limit",
            True,
            f"one virtual processor; {limits.cpus:g}: {group.held.get('cpu', group.missing.get('cpu'))}",
        ),
        Guarantee("disk limit", True, f"{limits.disk_bytes} bytes: size of the guest's root, in its memory"),
        Guarantee("no orphans", True, "the monitor ends with its owner"),
        Guarantee("memory snapshot", True, "snapshots hold memory, processor and devices; processes go on"),
    )
