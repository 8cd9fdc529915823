"""`perilune sandbox step`: one tool step of a trajectory, saved with a manifest; going on is refused where anything differs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from perilune.errors import ConfigError, RequestError

NONE = "none"
"""A version that was not given: it must not be given at the next step either."""


def versions_of(path: str | None) -> tuple[Any, list[int], list[int]]:
    """`manifest.Versions`, the token ids of the prefix so far, and of the prefix that will show this step, from a JSON file.

    Raises:
        RequestError: the file is no such object; names what is wrong.
    """
    from perilune.sandbox.manifest import Versions

    names = [field.name for field in fields(Versions)]
    if path is None:
        return Versions(**dict.fromkeys(names, NONE)), [], []
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        unknown = set(values) - {*names, "prefix", "tokens"}
        prefix, tokens = values.get("prefix", []), values.get("tokens", [])
        if unknown or not all(type(one) is int for one in [*prefix, *tokens]):
            raise ValueError(
                f"unknown keys {sorted(unknown)}" if unknown else "prefix and tokens must be lists of token ids"
            )
        return Versions(**{name: str(values.get(name, NONE)) for name in names}), prefix, tokens
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(
            f"--versions {path}: {error}; it must be an object with {', '.join(names)}, and the token ids prefix and tokens"
        ) from None


def step(sandboxes: Any, flags: argparse.Namespace, program: list[str], make: Any, run: Any) -> int:
    """Run a program in a trajectory's newest sandbox and record the step.

    Args:
        make: gives a new running sandbox from the flags, for a trajectory's first step.
        run: runs the program in a sandbox; gives its result.

    Returns:
        The program's exit code.

    Raises:
        Mismatch: a version or the prefix is not that of the last step; names the first field, and nothing ran.
    """
    from perilune.sandbox import TrajectoryLog

    if len(flags.names) != 1 or not program:
        raise ConfigError(
            "sandbox step needs a trajectory's name and a program: perilune sandbox step NAME -- make test"
        )
    if flags.url:
        raise ConfigError("sandbox step works on this machine's folder; leave --url out")
    versions, prefix, tokens = versions_of(flags.versions)
    log = TrajectoryLog(sandboxes, flags.names[0])
    if log.dropped:
        print(f"dropped {log.dropped} results that a killed process left without a saved step", file=sys.stderr)
    box = make() if log.latest() is None else log.resume(log.events, prefix, versions)
    try:
        result = run(box, program)
        event = {"argv": program, "code": result.code, "signal": result.signal, "timed_out": result.timed_out}
        event |= {name: getattr(result, name).decode(errors="backslashreplace") for name in ("stdout", "stderr")}
        manifest = log.record(box, event, tokens, versions)
    finally:
        box.destroy()
    if flags.json:
        print(json.dumps({"manifest": asdict(manifest), "result": event}))
    else:
        print(f"{manifest.trajectory}: step {manifest.step}, {manifest.environment}", file=sys.stderr)
    return result.code
