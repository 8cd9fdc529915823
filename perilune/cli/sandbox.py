"""`perilune sandbox`: run programs in a box of their own, save it, fork it, go on later."""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from perilune.cli import sandbox_manage
from perilune.cli.sandbox_manage import one_name
from perilune.cli.sandbox_open import created, opened, opened_there, variables
from perilune.cli.sandbox_sizes import size
from perilune.errors import ConfigError

HELP = """usage: perilune sandbox COMMAND [options] [-- PROGRAM ARGUMENTS…]

Run programs with files, processes and network of their own. A guest's changes end with it unless they are kept. Between commands a kept sandbox is paused: saved, no memory, no process. With --url they live in a service and run on.

  run [-- PROGRAM …]           in a new sandbox; its stdout is stdout, its stderr stderr, its exit code the exit code
  shell [NAME|SNAPSHOT]        a terminal in a new, a kept or a saved one
  ps                           sandboxes and snapshots; --watch: again and again
  snapshot NAME                save a sandbox as it is now under an id of its own
  fork NAME|SNAPSHOT [-n N]    N copies
  pause NAME                   save it and end its processes: no memory, no processor time
  resume NAME|SNAPSHOT [-- …]  run in a kept sandbox, or in a new one from a snapshot
  step TRAJECTORY -- PROGRAM   run in the newest sandbox of a trajectory and save the step with its manifest; --versions FILE (JSON:
                               weights, quantisation, template, harness, prefix, tokens) must fit the step before
  rm NAME|SNAPSHOT|TRAJECTORY …   remove, and free what nothing else needs; --lost: all whose process was killed
  serve                        a service with keys over HTTP, and a page that lists its sandboxes
  bench                        times, memory and overcommit of every driver that works here
  doctor                       what works here, what it guarantees, what to install; --build: make guest images now

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
  --driver NAME                proc (default); doctor lists the others
  --url URL                    of a service; also $PERILUNE_SANDBOX_URL, with its key in $PERILUNE_SANDBOX_KEY
  --json                       one JSON object on stdout
options of serve and of bench: perilune sandbox serve --help, perilune sandbox bench --help
"""
TIMED_OUT = 124


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"sandbox: {message}; see perilune sandbox --help")


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
    parser.add_argument("--memory", type=size)
    parser.add_argument("--disk", type=size)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--cpus", type=float)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--secret", action="append", default=[])
    parser.add_argument("--cwd", default="/workspace")
    parser.add_argument("--driver")
    parser.add_argument("--url", default=os.environ.get("PERILUNE_SANDBOX_URL"))
    parser.add_argument("--versions")
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--lost", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    if args and args[0] in _OWN_FLAGS:
        return importlib.import_module(_OWN_FLAGS[args[0]]).run(args[1:])
    split = args.index("--") if "--" in args else len(args)
    flags, program = _parser().parse_args(args[:split]), args[split + 1 :]
    if flags.help or flags.command is None:
        print(HELP, end="", file=sys.stdout if flags.help else sys.stderr)
        return 0 if flags.help else 2
    if flags.command not in _COMMANDS:
        raise ConfigError(
            f"sandbox {flags.command!r} is not one of {', '.join((*_COMMANDS, *_OWN_FLAGS))}; see perilune sandbox --help"
        )
    _refuse_what_is_not_heard(flags, program)
    # A closed terminal, too, unless it is to be ignored (nohup): what has a name is kept and nothing is left behind.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    from perilune.sandbox import RemoteSandboxes, Sandboxes

    with RemoteSandboxes(flags.url) if flags.url else Sandboxes() as sandboxes:
        return _COMMANDS[flags.command](sandboxes, flags, program)


def _refuse_what_is_not_heard(flags: argparse.Namespace, program: list[str]) -> None:
    if flags.command in ("ps", "doctor") and flags.names:
        raise ConfigError(f"sandbox {flags.command} takes no name; given: {' '.join(flags.names)}")
    if program and flags.command in ("ps", "snapshot", "fork", "pause", "rm", "doctor"):
        raise ConfigError(f"sandbox {flags.command} runs no program; leave out -- {' '.join(program)}")


def _run(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    if flags.names:
        raise ConfigError(
            f"sandbox run: what is {flags.names[0]!r}? The program goes behind --: perilune sandbox run -- ls /"
        )
    return _program(sandboxes, flags, program, None)


def _resume(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    if flags.url and not program:
        with opened_there(sandboxes, flags, one_name(flags, "resume"), True) as box:
            print(json.dumps({"sandbox": box.name, "id": box.id, "state": box.state.value}) if flags.json else box.name)
        return 0
    return _program(sandboxes, flags, program, one_name(flags, "resume"))


def _program(sandboxes: Any, flags: argparse.Namespace, program: list[str], source: str | None) -> int:
    if not program:
        raise ConfigError(
            f"sandbox {flags.command} needs a program behind --: perilune sandbox {flags.command} … -- ls /"
        )
    with opened(sandboxes, flags, source) as box:
        result = _executed(box, flags, program)
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
                {
                    "sandbox": box.name,
                    "kept": box.state.value != "dead" if flags.url else box.state.value == "paused",
                    "truncated": result.truncated,
                    **values,
                }
            )
        )
    return TIMED_OUT if result.timed_out else result.code


def _executed(box: Any, flags: argparse.Namespace, program: list[str]) -> Any:
    """Run the program with this process's input; its output is passed on, unless it goes into one JSON object."""
    env, secrets = variables(flags)
    streams = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}

    def pass_on(output: Any) -> None:
        streams[output.stream].write(output.data)
        streams[output.stream].flush()

    return box.exec(
        program, stdin=b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.fileno(), timeout=flags.timeout,
        env=env, secrets=secrets, cwd=flags.cwd, on_output=None if flags.json else pass_on,
    )  # fmt: skip


def _step(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    from perilune.cli.sandbox_step import step

    return step(
        sandboxes, flags, program, lambda: created(sandboxes, flags), lambda box, words: _executed(box, flags, words)
    )


def _shell(sandboxes: Any, flags: argparse.Namespace, program: list[str]) -> int:
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("sandbox shell needs a terminal on stdin; use run or resume for scripts")
    from perilune.cli.terminal import relay, window

    env, secrets = variables(flags)
    with opened(sandboxes, flags, one_name(flags, "shell") if flags.names else None) as box:
        env = {"TERM": os.environ.get("TERM", "xterm"), "PS1": f"{box.name}:\\w# ", **env}
        with contextlib.closing(
            box.terminal(
                program or ["/bin/sh"], env=env, secrets=secrets, cwd=flags.cwd, size=window(sys.stdin.fileno())
            )
        ) as process:
            return int(relay(process)["code"])


_COMMANDS: dict[str, Callable[[Any, argparse.Namespace, list[str]], int]] = {
    "run": _run, "shell": _shell, "ps": sandbox_manage.ps, "snapshot": sandbox_manage.snapshot, "fork": sandbox_manage.fork,
    "pause": sandbox_manage.pause, "resume": _resume, "step": _step, "rm": sandbox_manage.rm, "doctor": sandbox_manage.doctor,
}  # fmt: skip
_OWN_FLAGS = {"serve": "perilune.cli.sandbox_serve", "bench": "perilune.cli.sandbox_bench"}
"""Commands with a parser of their own."""
