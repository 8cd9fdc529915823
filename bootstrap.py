#!/usr/bin/env python3
"""Set up perilune in .venv, then run it.

python3 bootstrap.py demo              train a small K3 on real text, talk to it, open a report
python3 bootstrap.py test              linters and the test suite; extra arguments go to pytest
python3 bootstrap.py setup [--extras serve,report]
python3 bootstrap.py soak [NAME]       the long checks, resumable

Standard library only. torch is installed before the package, so that the package's own lower bound is already
satisfied and no second build of torch is fetched. A stamp file makes later calls start in well under a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "perilune-bootstrap.json")
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 14)  # the newest that torch 2.13.0 has a wheel for
TORCH = "2.13.0"
OLDEST_TORCH = (2, 11)
EXTRAS = {"demo": ["serve", "report"], "test": ["dev"], "soak": ["dev"], "setup": []}
LINTERS = (
    ("ruff check", ["ruff", "check", "."]),
    ("ruff format", ["ruff", "format", "--check", "."]),
    ("import-linter", ["lint-imports"]),
    ("basedpyright", ["basedpyright", "--level", "error"]),
)
NO_NETWORK = "Without a package index the command line still runs from this folder: python3 -m perilune --help"


def say(text):
    """Progress goes to stderr, so that `--json` output of the verb stays clean on stdout."""
    print("bootstrap: " + text, file=sys.stderr, flush=True)


def stop(text):
    """End with the message: what is wrong, what is allowed, what to do."""
    sys.exit("bootstrap: " + text)


# ---------------------------------------------------------------------------------------------- this machine


def dotted(version):
    """(3, 11) → "3.11"."""
    return ".".join(str(part) for part in version)


def usable_pythons():
    """Commands on PATH whose name says a supported version, newest first."""
    names = [f"python3.{minor}" for minor in range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1)]
    return [name for name in names if shutil.which(name)]


def check_machine(version=None, system_torch=None):
    """Stop with a clear message where perilune or torch cannot run.

    Args:
        version: (major, minor) of the interpreter; this one by default.
        system_torch: version of a torch that already imports here, or None.
    """
    version = tuple(version or sys.version_info[:2])
    given = f"Python {dotted(version)}"
    other = usable_pythons()
    hint = f"run `{other[0]} bootstrap.py …`" if other else "install one (for example Python 3.12) and call it"
    if os.name == "nt":
        stop("Windows is supported through WSL: open a WSL shell and run the same command there")
    if version < OLDEST_PYTHON:
        stop(f"{given} is too old: perilune needs {dotted(OLDEST_PYTHON)} or newer; {hint}")
    if system_torch:
        return
    if version > NEWEST_PYTHON:
        stop(f"{given} is too new: torch {TORCH} has wheels up to Python {dotted(NEWEST_PYTHON)}; {hint}")
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        stop("torch has no build for Intel Macs any more: use Linux or an Apple-silicon Mac")


def torch_version(python):
    """Version of the torch that `python` imports, or None if it imports none that is new enough."""
    code = "import torch; print(torch.__version__)"
    try:
        done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = done.stdout.decode().strip()
    if done.returncode or not found:
        return None
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    return found if numbers >= OLDEST_TORCH else None


# ---------------------------------------------------------------------------------------------- the stamp


def requirements_digest():
    """Hash of what pyproject.toml asks to install; other edits of that file need no new set-up."""
    import tomllib

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    wanted = [project[key] for key in ("requires-python", "dependencies", "optional-dependencies", "scripts")]
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]


def read_stamp():
    """What the last finished set-up did; {} if there is none, or if it does not describe this folder as it is now."""
    try:
        with open(STAMP, encoding="utf-8") as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    here = {"root": ROOT, "requirements": requirements_digest()}
    same = isinstance(stamp, dict) and all(stamp.get(key) == value for key, value in here.items())
    return stamp if same and os.access(PYTHON, os.X_OK) else {}


def write_stamp(extras, torch):
    """Written last and moved into place, so that an interrupted set-up is never taken for a finished one."""
    stamp = {"root": ROOT, "requirements": requirements_digest(), "extras": sorted(extras), "torch": torch}
    part = STAMP + ".part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(stamp, file, indent=1)
    os.replace(part, STAMP)


# ---------------------------------------------------------------------------------------------- installing


def make_venv(see_system):
    """Create .venv, or replace one whose interpreter no longer runs."""
    if (
        os.path.exists(PYTHON)
        and subprocess.run(
            [PYTHON, "-m", "pip", "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ).returncode
        == 0
    ):
        return
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        package = f"python{dotted(sys.version_info[:2])}-venv"
        stop(
            f"this Python has no ensurepip, so it cannot make a virtual environment; on Debian and Ubuntu: apt-get install {package}"
        )
    if os.path.exists(VENV):
        say(f"{VENV} has no working Python; making it anew")
    command = [sys.executable, "-m", "venv", "--clear"] + (["--system-site-packages"] if see_system else []) + [VENV]
    run(command, f"could not make {VENV}")


def run(command, problem, env=None):
    """Run a step of the set-up; stop with `problem` if it fails."""
    code = subprocess.call(command, cwd=ROOT, env=env, stdout=sys.stderr)
    if code:
        stop(f"{problem} (exit {code} of `{' '.join(command)}`). {NO_NETWORK}")


def pip(*arguments):
    """The pip command line of the environment."""
    return [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"] + list(arguments)


def download_size(requirement):
    """Bytes that pip would fetch for `requirement`, and how many packages; (None, 0) if it cannot be told.

    Asks pip for its plan without carrying it out, then each file's size from disk or from its server's headers.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "plan.json")
        try:
            subprocess.run(
                pip("--quiet", "--dry-run", "--report", report, requirement),
                timeout=90,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with open(report, encoding="utf-8") as file:
                urls = [item["download_info"]["url"] for item in json.load(file)["install"]]
            return sum(size_of(url) for url in urls), len(urls)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError):
            return None, 0


def size_of(url):
    """Bytes behind a file: or http: address; raises OSError or ValueError if it does not say."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return os.path.getsize(urllib.request.url2pathname(parts.path))
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
        return int(answer.headers["Content-Length"])


def expected_size():
    """What the torch download amounts to when the index does not tell: the usual builds, by platform."""
    if sys.platform.startswith("linux") and platform.machine() == "x86_64":
        return "about 0.2 GB for a CPU build, about 3 GB for the CUDA build that a default index offers"
    return "about 0.1 to 0.2 GB"


def install_torch():
    """Install torch alone and first: through uv's CPU index where there is no GPU and uv can reach it, else pip."""
    if not shutil.which("nvidia-smi") and shutil.which("uv"):
        say(f"installing torch {TORCH} (CPU build, about 0.2 GB) with uv")
        command = ["uv", "pip", "install", "--python", PYTHON, "--torch-backend=cpu", "torch==" + TORCH]
        if subprocess.call(command, cwd=ROOT, env=dict(os.environ, UV_HTTP_TIMEOUT="5"), stdout=sys.stderr) == 0:
            return
        say("uv could not; trying pip")
    size, packages = download_size("torch==" + TORCH)
    told = f"{size / 1e9:.2f} GB in {packages} packages" if size else expected_size()
    say(f"torch {TORCH}: {told} to download")
    run(pip("--quiet", "torch==" + TORCH), f"could not install torch {TORCH}")


def install_package(extras):
    """Install the package in place, with extras; torch is there already and is left alone."""
    target = ROOT + (f"[{','.join(sorted(extras))}]" if extras else "")
    say(f"installing perilune{target[len(ROOT) :]}")
    run(pip("--quiet", "--editable", target), "could not install the package")


def set_up(extras):
    """Bring .venv to a state with torch, the package and `extras`; nothing to do if the stamp says so."""
    stamp = read_stamp()
    done = set(stamp.get("extras", []))
    if stamp and set(extras) <= done:
        return
    with open(os.path.abspath(__file__), "rb") as lock:
        only_one(lock)
        done = set(read_stamp().get("extras", []))
        inside = torch_version(PYTHON) if os.path.exists(PYTHON) else None
        base = getattr(sys, "_base_executable", None) or sys.executable
        system = inside or torch_version(base)
        check_machine(system_torch=system)
        if system and not inside:
            say(f"torch {system} is on this machine already; .venv will use it")
        make_venv(see_system=system is not None and inside is None)
        torch = torch_version(PYTHON)
        if torch is None:
            install_torch()
            torch = torch_version(PYTHON)
            if torch is None:
                stop(f"torch was installed but does not import: run `{PYTHON} -c 'import torch'` to see why")
        names = done | set(extras)
        # Beside a CPU build of torch the tests get the Triton they are written for; a torch for GPUs brings its own.
        install_package(names | {"interpreter"} if "dev" in names and torch.endswith("+cpu") else names)
        write_stamp(names, torch)
    say(f"ready: torch {torch} in {VENV}")


def only_one(lock):
    """Wait for another set-up of the same folder to end."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("another set-up of this folder is running; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


# ---------------------------------------------------------------------------------------------- verbs


def test(arguments):
    """Linters and the whole suite; with pytest arguments, only those tests. Returns the exit status."""
    results = []
    if not arguments:
        for name, command in LINTERS:
            say("running " + name)
            command = [os.path.join(VENV, "bin", command[0])] + command[1:]
            results.append((name, subprocess.call(command, cwd=ROOT)))
    results.append(("pytest", pytest(arguments)))
    failed = [name for name, code in results if code]
    say("failed: " + ", ".join(failed) if failed else "all passed: " + ", ".join(name for name, _ in results))
    return 1 if failed else 0


def pytest(arguments):
    """One thread a worker: two workers with two threads each would fight over two cores."""
    workers = [] if "-n" in arguments or "-p" in arguments else ["-n", str(max(1, min(8, os.cpu_count() or 1)))]
    command = [PYTHON, "-m", "pytest", "-q", "--dist", "loadfile"] + workers + arguments
    return subprocess.call(command, cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS="1"))


def soak(arguments):
    """Full counts, one process, all cores for each check; continues after the checks that passed already."""
    chosen = ["-k", arguments[0]] if arguments and not arguments[0].startswith("-") else []
    command = [PYTHON, "-m", "pytest", "-v", "--soak", "-m", "soak"] + chosen + arguments[len(chosen) // 2 :]
    return subprocess.call(command, cwd=ROOT)


def parse_extras(arguments):
    """`setup --extras a,b` → ["a", "b"]."""
    if arguments[:1] == ["--extras"] and len(arguments) == 2:
        return [name for name in arguments[1].split(",") if name]
    if len(arguments) == 1 and arguments[0].startswith("--extras="):
        return [name for name in arguments[0][len("--extras=") :].split(",") if name]
    if arguments:
        stop(f"setup takes only --extras a,b; given: {' '.join(arguments)}")
    return []


def known_extras(names):
    """Stop at a name that pyproject.toml does not have: pip would only warn."""
    import tomllib

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        allowed = tomllib.load(file)["project"]["optional-dependencies"]
    for name in names:
        if name not in allowed:
            stop(f"unknown extra {name!r}; allowed: {', '.join(allowed)}")
    return names


def main(arguments):
    """Dispatch; returns the exit status. `demo` does not return: it becomes the perilune process."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb in ("-h", "--help"):
        print(__doc__)
        return 0
    if verb not in EXTRAS:
        print(__doc__, file=sys.stderr)
        say(f"unknown verb {verb!r}; allowed: {', '.join(EXTRAS)}" if verb else "which verb?")
        return 2
    if sys.version_info[:2] < OLDEST_PYTHON or os.name == "nt":
        check_machine()
    extras = EXTRAS[verb] + (known_extras(parse_extras(rest)) if verb == "setup" else [])
    if verb == "demo" and "--vision" in rest:
        extras = extras + ["vision"]
    set_up(extras)
    if verb == "demo":
        program = os.path.join(VENV, "bin", "perilune")
        os.execv(program, [program, "demo"] + rest)
    if verb == "setup":
        say("try: .venv/bin/perilune --help")
        return 0
    return test(rest) if verb == "test" else soak(rest)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
