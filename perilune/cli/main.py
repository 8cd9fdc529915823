"""`perilune VERB …`: pick the verb's module, run it, turn errors into messages and exit codes.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 stopped by Ctrl-C or SIGTERM, with what a verb promises to save. Nothing heavy is
imported before a verb is known, so `--help` and `--version` answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import io
import logging
import os
import signal
import sys
import threading
from typing import Any

from perilune import __version__
from perilune.errors import ConfigError, PeriluneError

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "train a small model on real text, talk to it, open a report"),
    "doctor": ("doctor", "what this machine has, and which implementation of each operation runs"),
    "explain": ("explain", "how a mechanism works: formula, reference, a computed picture"),
    "inspect": ("inspect", "parameters, tensors, state and cache bytes, FLOPs of a model"),
    "tokenize": ("tokenize", "text or a conversation to token ids, and back"),
    "data": ("data", "look at or build a corpus"),
    "train": ("train", "pre-train a model"),
    "ablate": ("ablate", "vary mechanisms at equal FLOPs and tabulate the effect"),
    "eval": ("eval", "bits per byte of a run on held-out text"),
    "generate": ("generate", "continue a prompt"),
    "chat": ("chat", "talk to a run in the terminal or the browser"),
    "serve": ("serve", "OpenAI-style HTTP server over one run"),
    "bench": ("bench", "speed of kernels, training and generation against peers"),
    "sandbox": ("sandbox", "run programs in a box of their own; save, fork and resume it"),
    "convert": ("convert", "runs and published checkpoints, one into the other"),
    "report": ("report", "one self-contained page about a run"),
}

_USAGE = "usage: perilune [--version] [-v | -q] VERB [options]"


def available() -> dict[str, tuple[str, str]]:
    """The verbs whose module exists in this installation."""
    return {
        verb: entry for verb, entry in VERBS.items() if importlib.util.find_spec(f"perilune.cli.{entry[0]}") is not None
    }


def _help() -> str:
    lines = [_USAGE, "", "The Kimi K3 system as one package: train, study and serve K3-class models.", "", "verbs:"]
    lines += [f"  {verb:<10} {text}" for verb, (_, text) in available().items()]
    return "\n".join([*lines, "", "perilune VERB --help tells a verb's options; most take --json."])


def _logging(level: int) -> None:
    """Our own messages from `level` on, warnings of everything else: torch, for one, logs its caches when it ends."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("perilune").setLevel(level)


def _standard_streams() -> None:
    """Make the three streams usable whatever started the process.

    A closed one is opened on nothing, or the next file that is opened, such as a checkpoint, would take its number and
    everything printed would go into it. A terminal or pipe of few letters (ASCII, Latin-1) shows the others escaped.
    Bytes on stdin that are no text come in as surrogates, which whoever reads them refuses by place.
    """
    for number, mode in enumerate(("r", "w", "w")):
        name = ("stdin", "stdout", "stderr")[number]
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors == "strict":
        sys.stdin.reconfigure(errors="surrogateescape")


def _stop(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _sigterm_interrupts() -> None:
    """Let SIGTERM end a verb as Ctrl-C does, so that what it holds (temporary files, guests, threads) is put away."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _stop)


def _no_reader() -> None:
    """The reader of a pipe went away (`perilune … | head`): point the streams at nothing so that exit does not fail again."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nothing, stream.fileno())
    os.close(nothing)


def _refused(error: OSError) -> str:
    """What the system refused, and to which file."""
    if error.filename is None:
        return f"the system refused something: {error.strerror or error}"
    return f"the system refused {error.filename}: {error.strerror}; check its path, permissions and disk"


def _no_memory(error: Exception) -> bool:
    """True if an allocation failed, Python's or torch's."""
    told = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in told or "out of memory" in told


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code.

    Args:
        argv: arguments without the program's name; None = `sys.argv[1:]`.
    """
    if argv is None:
        _standard_streams()
        _sigterm_interrupts()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()  # a reader that went away is noticed here and not after the last line of Python
        return code
    except BrokenPipeError:
        _no_reader()
        return 1


def _run(args: list[str]) -> int:
    """Run a command line, tell its errors and return the exit code; BrokenPipeError where nobody reads what it prints."""
    level = logging.INFO
    while args and args[0] in ("-v", "--verbose", "-q", "--quiet"):
        level = logging.DEBUG if args.pop(0) in ("-v", "--verbose") else logging.WARNING
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"perilune {__version__}")
        return 0
    verb, rest = args[0], args[1:]
    verbs = available()
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"error: unknown verb {verb!r}{hint}\n{_USAGE}\nverbs: {', '.join(verbs)}", file=sys.stderr)
        return 2
    _logging(level)
    try:
        return importlib.import_module(f"perilune.cli.{verbs[verb][0]}").run(rest)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except PeriluneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        raise
    except OSError as error:
        message = _refused(error)
        logging.getLogger("perilune").debug("where it came from:", exc_info=error)
    except (MemoryError, RuntimeError) as error:
        if not _no_memory(error):
            raise
        reason = (str(error) or "Python").splitlines()[0][:200]
        message = f"out of memory ({reason}); take a smaller model, batch or window"
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
