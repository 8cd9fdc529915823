"""`perilune sandbox`: run programs in a box of their own, save it, fork it, go on later."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NoReturn

from perilune.errors import ConfigError, SandboxError

HELP = """usage: perilune sandbox COMMAND [options] [-- PROGRAM ARGUMENTS…]

Run programs with files, processes and network of their own. A guest's changes end with it unless they are kept. Between commands a kept sandbox is paused: saved, no memory, no process.

  run [-- PROGRAM …]           in a new sandbox; its stdout is stdout, its stderr stderr, its exit code the exit code
  shell [NAME|SNAPSHOT]        a terminal in a new, a kept or a saved one
  ps                           kept sandboxes and snapshots
  snapshot NAME                save a kept sandbox as it is now under an id of its own
  fork NAME|SNAPSHOT [-n N]    N kept copies
  resume NAME|SNAPSHOT [-- …]  run in a kept sandbox, or in a new one from a snapshot
  rm NAME|SNAPSHOT …           remove, and free what nothing else needs; --lost: all whose process was killed
  doctor                       what works here, what it guarantees, what is missing

options of run, shell and resume
  --name NAME, --keep          keep it (paused) when the program has ended; a name implies it
  --image FOLDER               a root file system to start from (default: this machine's programs, without its data)
  --tree FOLDER                show a host folder; the guest's writes to it stay in the guest. May be given again
  --network none|host          none has loopback only (default)
  --changes memory|disk        where changed files are until they are saved; on disk --disk limits each of them, not all together
  --memory, --disk SIZE        1G, 256M (defaults)       --processes N   256       --cpus X   2
  --timeout SECONDS            exit code 124 after it (default 600)
  --env NAME=VALUE, --secret NAME   a variable; a secret's value is taken from this environment and never saved
  --cwd FOLDER                 /workspace (default)
  --driver NAME                proc
  --json                       one JSON object on stdout
"""
TIMED_OUT = 124
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"sandbox: {message}; see perilune sandbox --help")


def _size(text: str) -> int:
    number, unit = text.rstrip("bBiI").rstrip("kKmMgG"), text.rstrip("bBiI")[-1:].lower()
    try:
        return int(float(number) * _UNITS[unit if unit in _UNITS else ""])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512M or 2G") from None


def _parser() -> _Parser:
    parser = _Parser(prog="perilune sandbox", add_help=False, allow_abbrev=False)
    parser.add_argument("command", nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-n", "--count", type=int, default=1)
    parser.add_argument("--name")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--image")
    parser.add_argument("--tree", action="append", default=[])
    parser.add_argument("--network")
    parser.add_argument("--changes")
    parser.add_argument("--memory", type=_size)
    parser.add_argument("--disk", type=_size)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--cpus", type=float)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--secret", action="append", default=[])
    parser.add_argument("--cwd", default="/workspace")
    parser.add_argument("--driver", default="proc")
    parser.add_argument("--lost", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    split = args.index("--") if "--" in args else len(args)
    flags, program = _parser().parse_args(args[:split]), args[split + 1 :]
    if flags.help or flags.command is None:
        print(HELP, end="", file=sys.stdout if flags.help else sys.stderr)
        return 0 if flags.help else 2
    if flags.command not in _COMMANDS:
        raise ConfigError(
            f"sandbox {flags.command!r} is not one of {', '.join(_COMMANDS)}; see perilune sandbox --help"
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    from perilune.sandbox import Sandboxes

    with Sandboxes() as sandboxes:
        return _COMMANDS[flags.command](sandboxes, flags, program)


def _spec(flags: argparse.Namespace) -> Any:
    from perilune.sandbox import Limits, Spec

    given = {
        "memory_bytes": flags.memory, "disk_bytes": flags.disk, "processes": flags.processes, "cpus": flags.cpus,
        "exec_seconds": flags.timeout,
    }  # fmt: skip
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    return Spec(
        template=flags.image or "host",
        trees=tuple(flags.tree),
        limits=limits,
        network=flags.network or "none",
        changes=flags.changes or "memory",
    )


def _variables(flags: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    env, secrets = {}, {}
    for pair in flags.env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--env {pair!r} must be NAME=VALUE")
        env[name] = value
    for name in flags.secret:
        if name not in os.environ:
            raise ConfigError(f"--secret {name}: this environment has no variable {name}")
        secrets[name] = os.environ[name]
    return env, secrets


@contextlib.contextmanager
def _opened(sandboxes: Any, flags: argparse.Namespace, source: str | None) -> Iterator[Any]:
    """A running sandbox: new, kept, or from a snapshot; kept again afterwards where that is wanted."""
    keep = flags.keep or flags.name is not None
    if source is not None:
        given = [
            name
            for name in ("image", "network", "changes", "memory", "disk", "processes", "cpus")
            if getattr(flags, name) is not None
        ]
        if given or flags.tree:
            raise ConfigError(f"--{(given or ['tree'])[0]} is decided when a sandbox is made; {source} has its own")
    if source is None:
        box = sandboxes.create(_spec(flags), driver=flags.driver, name=flags.name)
    elif source.startswith("snap-"):
        box = sandboxes.resume(source, name=flags.name)
    else:
        if flags.name is not None:
            raise ConfigError(f"--name {flags.name}: {source} has a name; fork it to have another one")
        box, keep = sandboxes.open(source), True
        try:
            box.resume()
        except BaseException:
            box.release()
            raise
    before = box.snapshot if source is None or not source.startswith("snap-") else None
    try:
        yield box
    finally:
        if keep and box.state.value == "running":
            try:
                box.release()
            except SandboxError:
                if before is not None:  # What was kept before stays as it was.
                    box.revert()
                    box.release()
                raise
            if before is not None:
                sandboxes.home.store.delete([before])
            if not flags.json:
                print(f"kept: {box.name}", file=sys.stderr)


def _run(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    if flags.names:
        raise ConfigError(
            f"sandbox run: what is {flags.names[0]!r}? The program goes behind --: perilune sandbox run -- ls /"
        )
    return _program(sandboxes, flags, program, None)


def _resume(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    return _program(sandboxes, flags, program, _one(flags, "resume"))


def _one(flags: argparse.Namespace, command: str) -> str:
    if len(flags.names) != 1:
        raise ConfigError(f"sandbox {command} needs one name or snapshot; given: {' '.join(flags.names) or 'nothing'}")
    return flags.names[0]


def _program(sandboxes: Any, flags: argparse.Namespace, program: list[str], source: str | None) -> int:
    if not program:
        raise ConfigError(
            f"sandbox {flags.command} needs a program behind --: perilune sandbox {flags.command} … -- ls /"
        )
    env, secrets = _variables(flags)
    streams = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}

    def pass_on(output: Any) -> None:
        streams[output.stream].write(output.data)
        streams[output.stream].flush()

    with _opened(sandboxes, flags, source) as box:
        result = box.exec(
            program, stdin=b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.fileno(), timeout=flags.timeout,
            env=env, secrets=secrets, cwd=flags.cwd, on_output=None if flags.json else pass_on,
        )  # fmt: skip
    for happened, text in ((result.timed_out, "its time was over"), (result.out_of_memory, "it ran out of memory")):
        if happened and not flags.json:
            print(f"perilune: killed: {text}", file=sys.stderr)
    if flags.json:
        values = asdict(result)
        for stream in ("stdout", "stderr"):
            data: bytes = values[stream]
            try:
                values[stream] = data.decode()
            except UnicodeDecodeError:
                values[stream], values[f"{stream}_base64"] = "", base64.b64encode(data).decode()
        print(
            json.dumps(
                {"sandbox": box.name, "kept": box.state.value == "paused", "truncated": result.truncated, **values}
            )
        )
    return TIMED_OUT if result.timed_out else result.code


def _shell(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    if not sys.stdin.isatty():
        raise ConfigError("sandbox shell needs a terminal on stdin; use run or resume for scripts")
    from perilune.cli.terminal import relay

    env, secrets = _variables(flags)
    with _opened(sandboxes, flags, _one(flags, "shell") if flags.names else None) as box:
        env = {"TERM": os.environ.get("TERM", "xterm"), "PS1": f"{box.name}:\\w# ", **env}
        with contextlib.closing(
            box.terminal(program or ["/bin/sh"], env=env, secrets=secrets, cwd=flags.cwd)
        ) as process:
            return int(relay(process)["code"])


def _ps(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    reaped = sandboxes.home.reap()
    store = sandboxes.home.store
    records = [
        {name: getattr(record, name) for name in ("name", "id", "driver", "state", "snapshot", "created", "pid")}
        for record in sandboxes.home.records()
    ]
    saved = []
    for name in store.snapshots():
        try:
            snapshot = store.snapshot(name)
            saved.append(
                {key: getattr(snapshot, key) for key in ("id", "sandbox", "entries", "bytes", "created", "contains")}
            )
        except SandboxError as error:
            saved.append({"id": name, "damaged": str(error)})
    if flags.json:
        print(
            json.dumps({"sandboxes": records, "snapshots": saved, "store_bytes": store.used_bytes(), "reaped": reaped})
        )
        return 0
    if reaped:
        print(f"removed {reaped} sandboxes whose process was killed", file=sys.stderr)
    print(f"{'SANDBOX':<24}{'DRIVER':<8}{'STATE':<10}{'AGE':>7}  SNAPSHOT")
    for record in records:
        print(
            f"{record['name']:<24}{record['driver']:<8}{record['state']:<10}{_age(record['created']):>7}  {record['snapshot'] or ''}"
        )
    print(f"\n{'SNAPSHOT':<24}{'OF':<18}{'FILES':>7}{'BYTES':>14}{'AGE':>7}")
    for entry in saved:
        if "damaged" in entry:
            print(f"{entry['id']:<24}{entry['damaged']}")
        else:
            print(
                f"{entry['id']:<24}{entry['sandbox']:<18}{entry['entries']:>7}{entry['bytes']:>14,}{_age(entry['created']):>7}"
            )
    print(f"\nstore: {store.used_bytes():,} bytes in {store.root}")
    return 0


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def _saved_state(sandboxes: Any, name: str) -> str:
    """The snapshot that a name stands for: itself, or the newest one of a paused sandbox."""
    if name.startswith("snap-"):
        return name
    record = sandboxes.home.find(name)
    if record.state != "paused" or record.snapshot is None:
        raise SandboxError(f"sandbox {name} is {record.state}; only a paused one has a saved state")
    return record.snapshot


def _snapshot(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    store = sandboxes.home.store
    made = store.copy(store.snapshot(_saved_state(sandboxes, _one(flags, "snapshot"))))
    print(json.dumps(asdict(made)) if flags.json else made.id)
    return 0


def _fork(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    if flags.count < 1:
        raise ConfigError(f"-n {flags.count}: at least 1 copy")
    source = _one(flags, "fork")
    snapshot = _saved_state(sandboxes, source)
    prefix = flags.name or (None if source.startswith("snap-") else source)
    made = [
        sandboxes.shelve(snapshot, name=None if prefix is None else _free_name(sandboxes, prefix))
        for _ in range(flags.count)
    ]
    if flags.json:
        print(
            json.dumps(
                {"sandboxes": [{"name": record.name, "id": record.id, "snapshot": record.snapshot} for record in made]}
            )
        )
    else:
        print("\n".join(record.name for record in made))
    return 0


def _free_name(sandboxes: Any, prefix: str) -> str:
    taken = {record.name for record in sandboxes.home.records()}
    return next(name for number in range(1, len(taken) + 2) if (name := f"{prefix}-{number}") not in taken)


def _rm(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    home = sandboxes.home
    names = [*flags.names, *(record.name for record in home.records() if flags.lost and record.state == "lost")]
    if not names and not flags.lost:
        raise ConfigError("sandbox rm needs names or snapshots, or --lost")
    snapshots = []
    for name in names:
        if name.startswith("snap-"):
            snapshots.append(name)
            continue
        record = home.find(name)
        home.remove(name)
        if record.snapshot is not None and home.store.snapshot_path(record.snapshot).exists():
            snapshots.append(record.snapshot)
    freed = home.store.delete(snapshots)
    print(
        json.dumps({"removed": names, "freed_bytes": freed})
        if flags.json
        else f"removed {len(names)}, freed {freed:,} bytes"
    )
    return 0


def _doctor(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    from perilune.sandbox.drivers import DRIVERS

    sandboxes.home.reap()
    probes = [sandboxes.probe(name) for name in DRIVERS]
    problems = sandboxes.home.store.verify()
    if flags.json:
        print(json.dumps({"drivers": [asdict(probe) for probe in probes], "store": {"root": str(sandboxes.home.store.root),
                          "bytes": sandboxes.home.store.used_bytes(), "problems": problems}}))  # fmt: skip
    else:
        for probe in probes:
            print(f"{probe.driver}: {'works' if probe.passed else 'does not work'}: {probe.reason}")
            for guarantee in probe.guarantees:
                print(f"  {'yes' if guarantee.held else 'no ':<4}{guarantee.name:<16}{guarantee.how}")
            if not probe.passed:
                print("  needs user namespaces with mounts in them: kernel 5.11 or newer, kernel.unprivileged_userns_clone=1 where "
                      "there is such a setting,\n  and in a container the right to make them (docker run --privileged)")  # fmt: skip
        print(
            f"store: {sandboxes.home.store.used_bytes():,} bytes in {sandboxes.home.store.root}, {len(problems) or 'no'} problems"
        )
        for problem in problems:
            print(f"  {problem}")
    return 0 if all(probe.passed for probe in probes) and not problems else 1


_COMMANDS = {
    "run": _run, "shell": _shell, "ps": _ps, "snapshot": _snapshot, "fork": _fork, "resume": _resume, "rm": _rm,
    "doctor": _doctor,
}  # fmt: skip
