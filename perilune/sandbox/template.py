"""What a guest's files start from: a small root built for this machine's own programs, or the folder of an image.

The template "host" shows the host's /usr (and /bin, /lib where they are folders of their own) and a root that holds only what
programs need: no user's files, no secrets of /etc. The guest's writes go to its own layer and never reach these folders.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path

from perilune.errors import ConfigError
from perilune.sandbox.protocol import Spec

PROGRAM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "os-release", "debian_version",
    "protocols", "services", "profile", "bash.bashrc", "ca-certificates.conf", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs",
)  # fmt: skip
"""Parts of the host's /etc that programs look up and that anyone may read."""
WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "shells": "/bin/sh\n",
    "resolv.conf": "",
}
_TOPS = ("bin", "lib", "sbin", "local/bin")
_SENSITIVE = ("/", "/proc", "/sys", "/dev", "/run", "/etc")


def trees(spec: Spec, templates: Path) -> list[dict[str, str | None]]:
    """The folders that a guest sees, as `guest/rooting.py` mounts them: the root first, each {path, lower}.

    Raises:
        ConfigError: an image or a tree that is no folder, or one that would show the host's insides.
    """
    found: list[dict[str, str | None]]
    if spec.template == "host":
        found = [{"path": "", "lower": str(_skeleton(templates))}]
        for name in PROGRAM_FOLDERS:
            if Path("/", name).is_dir() and not Path("/", name).is_symlink():
                found.append({"path": name, "lower": f"/{name}"})
    else:
        found = [{"path": "", "lower": str(_folder(spec.template, "image"))}]
    for tree in spec.trees:
        path = _folder(tree, "tree")
        if str(path) in _SENSITIVE:
            raise ConfigError(f"tree {tree} would show the host's own {path}; name a folder of programs or data")
        inside = str(path).lstrip("/")
        if inside not in {shown["path"] for shown in found}:
            found.append({"path": inside, "lower": str(path)})
    # Mounted in this order: what lies in another tree comes after it.
    found.sort(key=lambda shown: str(shown["path"]))
    return [*found, {"path": "dev/shm", "lower": None}]


def _folder(name: str, what: str) -> Path:
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"{what} {name!r} is not a folder; give the folder of a root file system" if what == "image"
                          else f"{what} {name!r} is not a folder")  # fmt: skip
    return path


def template_hash(spec: Spec, templates: Path) -> str:
    """Identity of what a guest starts from: names, sizes, times and modes of the top of every tree, not the content of all files.

    A snapshot made over one template is not resumed over another. For the host's programs the package database stands for them.
    """
    shown = [tree for tree in trees(spec, templates) if tree["lower"] is not None]
    tops = []
    for tree in shown:
        for name in ("", *_TOPS):
            with contextlib.suppress(OSError):
                tops.append((tree["path"], name, os.stat(f"{tree['lower']}/{name}").st_mtime_ns))
    return _hash(spec.template, tuple((str(tree["path"]), str(tree["lower"])) for tree in shown), tuple(tops))


@functools.lru_cache(maxsize=64)
def _hash(template: str, shown: tuple[tuple[str, str], ...], tops: tuple[tuple[str, str, int], ...]) -> str:
    """The hash itself, computed again only when a folder at the top has changed."""
    state = hashlib.blake2b(platform.machine().encode(), digest_size=16)
    for path, lower in shown:
        state.update(f"\0{path}\0".encode())
        if path == "" and template == "host":
            state.update(Path(lower).name.encode())
            continue
        for root in (lower, *(f"{lower}/{name}" for name in _TOPS)):
            with contextlib.suppress(OSError), os.scandir(root) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    info = entry.stat(follow_symlinks=False)
                    size = 0 if entry.is_dir(follow_symlinks=False) else info.st_size
                    state.update(
                        f"{entry.name}\0{info.st_mode}\0{size}\0{int(info.st_mtime)}\n".encode(errors="surrogateescape")
                    )
    return state.hexdigest()


def _skeleton(templates: Path) -> Path:
    """The root of the template "host", built once for this state of /etc and used by all guests."""
    key = hashlib.blake2b(repr((PROGRAM_FOLDERS, ETC, WRITTEN)).encode(), digest_size=12)
    for name in ("ld.so.cache", "os-release", "alternatives"):
        with contextlib.suppress(OSError):
            info = os.stat(f"/etc/{name}")
            key.update(f"{name}\0{info.st_size}\0{info.st_mtime_ns}".encode())
    wanted = templates / f"host-{key.hexdigest()}"
    if wanted.is_dir():
        return wanted
    templates.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=templates))
    try:
        _build(building)
        building.chmod(0o755)
        os.rename(building, wanted)
    except OSError:
        shutil.rmtree(building, ignore_errors=True)
        if not wanted.is_dir():  # Otherwise another process was faster.
            raise
    return wanted


def _build(root: Path) -> None:
    for name in ("dev", "proc", "etc", "root", "tmp", "var/tmp", "workspace", "home", "run", "mnt", "opt", "srv"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "root").chmod(0o700)
    for name in PROGRAM_FOLDERS:
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            (root / name).mkdir()
    for name in ETC:
        source, target = Path("/etc", name), root / "etc" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.is_dir():
            shutil.copytree(source, target, symlinks=True, copy_function=_copy_readable)
        elif source.is_file():
            shutil.copyfile(source, target)
    for name, text in WRITTEN.items():
        (root / "etc" / name).write_text(text)


def _copy_readable(source: str, target: str) -> None:
    with contextlib.suppress(PermissionError):
        shutil.copyfile(source, target)


def first_difference(recorded: str, wanted: str) -> tuple[str, str, str]:
    """Name and both values of the first part in which two template hashes differ.

    A machine's is a line of `name=value` parts (how it runs, kernel, image, memory); any other is one part, "template_hash".
    """
    parts: list[dict[str, str]] = []
    for text in (recorded, wanted):
        pairs = (part.partition("=") for part in text.split() if "=" in part)
        parts.append({name: value for name, _, value in pairs})
    for name in parts[1]:
        if parts[0].get(name) != parts[1][name]:
            return name, parts[0].get(name, ""), parts[1][name]
    return "template_hash", recorded, wanted
