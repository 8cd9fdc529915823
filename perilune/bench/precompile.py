"""Compile a peer's Triton kernels in many processes before they are timed.

    python -m perilune.bench.precompile PART/PARTS SECONDS TASK    # one of the processes that `precompile` starts

A library that chooses launch settings by trying them compiles some two hundred kernels before its first result: minutes on
one core. Then it runs each for a tenth of a second: minutes again, so this process is told to be content with a fifth of that.
Here every process makes the peer's calls with its autotuner replaced by one that compiles each PARTS-th candidate and launches
none; the results stay in Triton's cache on disk, where the process that measures finds them. What a process calls with is
garbage from the first kernel on, since nothing was computed; only the shapes matter.

Tasks: `kda:H,H,...` is fla-core's chunk_kda, forward and backward, for these numbers of heads of 128 channels, `kda_softplus:H,H,...`
the same without a bound on the decay;
`train:PRESET` a training step of transformers' kimi_linear in the preset's shape.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PROCESSES = 16
START_SECONDS = 15.0  # of a process until its first kernel: a shorter rest of a budget is not worth one
LONGEST = 3600.0
TOKENS = 256


def end_within(seconds: float, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended; those that have not after so many seconds are killed."""
    end = time.monotonic() + seconds
    try:
        for process in processes:
            process.wait(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def precompile(*tasks: str, seconds: float = math.inf) -> list[str]:
    """Run the tasks, all of them in every process.

    Args:
        tasks: see above.
        seconds: after which the processes end, wherever they are; a later call goes on. What was finished before is not
            begun again.

    Returns:
        Problems that processes reported, without repetition. A candidate that does not fit the device is none.
    """
    _try_briefly()
    stamps = {task: stamp for task in tasks if not (stamp := _stamp(task)).exists()}
    tasks = tuple(stamps)
    if seconds < START_SECONDS or not tasks:
        return []
    parts = max(1, min(PROCESSES, os.cpu_count() or 1))
    limit = min(seconds, LONGEST)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{part}.txt" for part in range(parts)]
        running = []
        for part, log in enumerate(logs):
            command = [sys.executable, "-m", "perilune.bench.precompile", f"{part}/{parts}", str(limit), *tasks]
            with log.open("w") as file:
                running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=_environment()))
        end_within(limit, running)
        problems = [line for log in logs for line in log.read_text().splitlines() if line.startswith("precompile: ")]
    if not problems and all(process.returncode == 0 for process in running):
        for stamp in stamps.values():
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
    return sorted(set(problems))


def _stamp(task: str) -> Path:
    """A file that says that all of this task's kernels are in Triton's cache, for these versions."""
    names = [task.replace(":", "-")]
    for package in ("torch", "triton", "fla-core", "transformers"):
        with suppress(PackageNotFoundError):
            names.append(version(package))
    cache = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    return Path(cache) / "compiled-ahead" / "-".join(names)


def _try_briefly() -> None:
    """Triton's autotuner in this process runs a candidate for some 20 ms."""
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:  # nothing to tune
        return
    Autotuner.do_bench = staticmethod(partial(do_bench, warmup=4, rep=16))


def _environment() -> dict[str, str]:
    """Of a process: its timings, which mean nothing, must not be kept, and one thread is enough."""
    kept = {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | kept | {"PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"}


def compile_only(part: int, parts: int, end: float) -> list[str]:
    """From now on Triton's autotuner compiles candidates part, part + parts, ... and launches nothing.

    Returns:
        The kernels for which time did not suffice, as they come.
    """
    from triton.runtime.autotuner import Autotuner

    left: list[str] = []

    def run(self: Autotuner, *args: object, **kwargs: object) -> None:
        self.nargs = dict(zip(self.arg_names, args))
        try:
            # Turned by the kernel's name: where there are few candidates, not always the same processes have them.
            first = (part + zlib.crc32(self.base_fn.__name__.encode())) % parts
            for config in self.prune_configs(kwargs)[first::parts]:
                if time.monotonic() >= end:
                    left.append(self.base_fn.__name__)
                else:
                    _compile(self, args, kwargs | config.all_kwargs() | {"warmup": True})
        finally:
            self.nargs = None

    Autotuner.run = run
    return left


def _compile(tuner: Any, args: tuple, kwargs: dict) -> None:
    try:
        tuner.fn.run(*args, **kwargs)
    except Exception as error:  # a candidate that needs too much shared memory is one that the tuner will drop as well
        if "resource" not in str(error).lower():
            _report(f"{tuner.base_fn.__name__}: {type(error).__name__}")


def _report(text: str) -> None:
    print(f"precompile: {text}", file=sys.stderr, flush=True)


def _kda(heads: str, softplus: bool = False) -> None:
    import torch

    from perilune.bench import gpu_kda

    op = gpu_kda.peer()
    assert op is not None, "fla-core is not installed"
    for count in map(int, heads.split(",")):
        sets = [gpu_kda.inputs(1, TOKENS, count, 0)]
        settings = gpu_kda.SOFTPLUS if softplus else gpu_kda.SETTINGS
        gpu_kda.forward(op, sets, settings)()
        gpu_kda.training(op, sets, settings)()
        torch.cuda.synchronize()


def _train(name: str) -> None:
    from perilune.bench import gpu_train

    gpu_train.peer_once(name, TOKENS)


TASKS: dict[str, Callable[[str], None]] = {
    "kda": _kda,
    "kda_softplus": partial(_kda, softplus=True),
    "train": _train,
}


def main(part: str, seconds: str, *tasks: str) -> int:
    """Run the tasks as one of the processes. Exit code: 1 if time did not suffice."""
    number, parts = map(int, part.split("/"))
    left = compile_only(number, parts, time.monotonic() + float(seconds) - 2)
    for task in tasks:
        name, _, argument = task.partition(":")
        try:
            TASKS[name](argument)
        except Exception as error:  # whatever garbage leads to; what is compiled by then counts
            _report(f"{task}: {type(error).__name__}: {str(error)[:200]}".replace("\n", " "))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
