"""Builds what a virtual machine boots: a bare kernel and an initial root, from packages of this machine's distribution.

    small     busybox
    python    busybox and the distribution's Python
    a folder  the root file system of an image, for example an unpacked container image

Packages are downloaded and unpacked, never installed. The agent (`vm/*.c`) is compiled with the system's compiler and linked statically:
a shell cannot keep frames, credits and control groups, and an interpreter would cost every guest ten megabytes and every command a
slow fork; the static program costs 0.9 MB and runs on any root. Needs apt, dpkg-deb, a C compiler, and lz4 or zstd for kernels packed so.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perilune.errors import ConfigError
from perilune.sandbox.guest.archive import Archive
from perilune.sandbox.protocol import DriverUnavailable

IMAGES_VARIABLE = "PERILUNE_SANDBOX_IMAGES"
VARIANTS = ("small", "python")
AGENT = Path(__file__).parent / "vm"
KERNELS = ("linux-image-cloud-amd64", "linux-image-amd64", "linux-image-virtual", "linux-image-generic")
"""Packages that name the newest kernel; the first one that the distribution has."""
MODULES = (
    "virtio_ring", "virtio", "virtio_mmio", "virtio_console", "vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport",
)  # fmt: skip
"""In the order in which they are loaded: a machine's devices, its port, and sockets between host and guest."""
PYTHON = ("python3",)
UNNEEDED = (
    "usr/share/doc/", "usr/share/man/", "usr/share/locale/", "usr/share/lintian/", "usr/share/info/", "usr/share/zoneinfo/right/",
    "usr/share/bug/", "usr/share/menu/", "usr/share/perl5/", "usr/lib/x86_64-linux-gnu/gconv/", "usr/share/bash-completion/",
)  # fmt: skip
FOLDERS = {
    "workspace": 0o755, "tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755,
    "mnt": 0o755, "etc": 0o755, "perilune": 0o755, "home": 0o755, "opt": 0o755, "srv": 0o755, "usr/local/bin": 0o755,
}  # fmt: skip
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "shells": "/bin/sh\n",
    "alternatives/README": "",
}
TOOL_SECONDS, DOWNLOAD_SECONDS = 120.0, 600.0
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Image:
    """What a machine boots; the hashes are of the files' content."""

    name: str
    kernel: str
    initrd: str
    kernel_hash: str
    image_hash: str
    kernel_version: str


def default_folder() -> Path:
    """Where images lie: $PERILUNE_SANDBOX_IMAGES, else perilune/sandbox-images under the user's cache folder."""
    if chosen := os.environ.get(IMAGES_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perilune/sandbox-images"


def image(template: str, folder: Path | None = None, *, force: bool = False) -> Image:
    """The image for a template, built if it is not there.

    Args:
        template: one of `VARIANTS`, "host" (the small one), or the folder of a root file system.
        folder: where images lie; None = `default_folder()`.
        force: build it again.

    Raises:
        ConfigError: no such template.
        DriverUnavailable: a tool or a package is missing; the message says how to get it.
    """
    folder = folder or default_folder()
    name = "small" if template == "host" else template
    if name not in VARIANTS and not Path(name).expanduser().is_dir():
        raise ConfigError(f"template {template!r} of a machine is not one of host, {', '.join(VARIANTS)}, nor a folder")
    sources = hashlib.sha256(repr((FORMAT, MODULES, UNNEEDED, FOLDERS, ETC, PYTHON)).encode())
    for path in sorted(AGENT.iterdir()):
        sources.update(path.read_bytes())
    wanted = folder / f"{name.replace('/', '%')[-100:]}-{sources.hexdigest()[:12]}"
    record = wanted / "image.json"
    if name in VARIANTS and not force:
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return Image(**json.loads(record.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
    try:
        made = _build(name, building, wanted)
        if name not in VARIANTS:  # A folder may have changed: its content decides the name.
            wanted = folder / f"folder-{made.image_hash}"
            made = Image(**{**asdict(made), "kernel": str(wanted / "vmlinux"), "initrd": str(wanted / "initrd")})
            record = wanted / "image.json"
            if record.exists():
                return made
        (building / "image.json").write_text(json.dumps(asdict(made)))
        shutil.rmtree(building / "work")
        if wanted.exists():
            os.rename(wanted, building / "old")
        os.rename(building, wanted)
        shutil.rmtree(wanted / "old", ignore_errors=True)
        return made
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(name: str, building: Path, wanted: Path) -> Image:
    work = building / "work"
    work.mkdir()
    packages = _kernel_package(), "busybox-static"
    roots = dict(zip(("kernel", "busybox"), (_unpacked([package], work / package) for package in packages)))
    packed = next((roots["kernel"] / "boot").glob("vmlinuz-*"), None)
    if packed is None:
        raise DriverUnavailable(f"the package {packages[0]} holds no boot/vmlinuz-*")
    version = packed.name.removeprefix("vmlinuz-")
    (building / "vmlinux").write_bytes(bare_kernel(packed.read_bytes()))
    agent = _compiled(work / "agent")
    with open(building / "initrd", "wb") as file:
        archive = Archive(file)
        for path, mode in FOLDERS.items():
            archive.folder(path, mode)
        archive.file_of("init", agent.read_bytes(), 0o755)
        for module in MODULES:
            found = next((roots["kernel"] / "lib/modules" / version).rglob(f"{module}.ko*"), None)
            if found is not None:  # Otherwise it is part of the kernel.
                archive.file_of(f"perilune/{module}.ko", _unpack(found.read_bytes()))
        archive.file_of("perilune/modules", "".join(f"{module}\n" for module in MODULES).encode())
        if name not in VARIANTS:
            archive.tree(Path(name).expanduser(), skip=("proc/", "sys/", "dev/"))
        elif name == "python":
            root = _unpacked(_closure(PYTHON), work / "python")
            _compile_python(root)
            archive.tree(root, skip=UNNEEDED)
        for path, text in ETC.items():
            archive.file_of(f"etc/{path}", text.encode())
        if name in VARIANTS:
            busybox = roots["busybox"] / "bin/busybox"
            archive.file_of("bin/busybox", busybox.read_bytes(), 0o755)
            for path in _run([str(busybox), "--list-full"]).decode().split():
                archive.link(path, "/bin/busybox")
        archive.close()
    return Image(
        name=name, kernel=str(wanted / "vmlinux"), initrd=str(wanted / "initrd"), kernel_hash=_hash(building / "vmlinux"),
        image_hash=_hash(building / "initrd"), kernel_version=version,
    )  # fmt: skip


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def text_hash(text: str) -> str:
    """A short hash of a line of text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _run(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    seconds: float = TOOL_SECONDS,
    cwd: Path | None = None,
    check: bool = True,
) -> bytes:
    environment = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LC_ALL": "C.UTF-8"}
    for name in ("http_proxy", "https_proxy", "no_proxy", "TMPDIR"):
        if name in os.environ:
            environment[name] = os.environ[name]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=seconds, cwd=cwd, env=environment)
    except FileNotFoundError:
        raise DriverUnavailable(f"{command[0]} is not installed; {_INSTALL.get(command[0], 'install it')}") from None
    except subprocess.TimeoutExpired:
        raise DriverUnavailable(f"{' '.join(command[:3])} took more than {seconds:g} s") from None
    if check and done.returncode != 0:
        raise DriverUnavailable(
            f"{' '.join(command[:4])} failed: {done.stderr.decode(errors='replace').strip()[-500:]}"
        )
    return done.stdout


_INSTALL = {
    "apt-get": "guest images are built from Debian or Ubuntu packages",
    "apt-cache": "guest images are built from Debian or Ubuntu packages",
    "lz4": "apt-get install lz4 (the kernel is packed with it)",
    "zstd": "apt-get install zstd (the kernel is packed with it)",
    "cc": "apt-get install gcc libc6-dev (the guest's agent is compiled here)",
}


def _kernel_package() -> str:
    for name in KERNELS:
        for line in _run(["apt-cache", "depends", name], check=False).decode().splitlines():
            if found := re.fullmatch(r"\s*Depends: (linux-image-\S+)", line):
                return found[1]
    raise DriverUnavailable(f"no package {' or '.join(KERNELS)} is known to apt; run apt-get update")


def _closure(packages: Iterable[str]) -> list[str]:
    """The packages with all that they depend on, as apt would install them on an empty machine."""
    with tempfile.NamedTemporaryFile() as nothing:
        text = _run(
            ["apt-get", "install", "--simulate", "--no-install-recommends", "-o", f"Dir::State::status={nothing.name}", *packages]
        ).decode()  # fmt: skip
    names = [line.split()[1] for line in text.splitlines() if line.startswith("Inst ")]
    if not names:
        raise DriverUnavailable(f"apt knows no way to install {' '.join(packages)}; run apt-get update")
    return names


def _unpacked(packages: Iterable[str], into: Path) -> Path:
    into.mkdir()
    downloads = into.with_name(f"{into.name}.debs")
    downloads.mkdir()
    # Root's apt would step down to a user who may not write here.
    _run(
        ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *packages],
        seconds=DOWNLOAD_SECONDS,
        cwd=downloads,
    )
    for deb in sorted(downloads.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(deb), str(into)])
        deb.unlink()
    return into


def _compile_python(root: Path) -> None:
    """Compile the guest's library with its own interpreter here: under emulation its first imports would take ten seconds."""
    library = next((root / "usr/lib").glob("python3.*"))
    loader, folders = (
        next((root / "lib64").glob("ld-linux*")),
        [*root.glob("lib/*-linux-gnu"), *root.glob("usr/lib/*-linux-gnu")],
    )
    # Times of files are not kept in the archive, so compiled files go by their content.
    _run([str(loader), "--library-path", ":".join(map(str, folders)), str(root / "usr/bin" / library.name), "-I", "-S", "-m", "compileall",
          "-q", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/", str(library)], check=False)  # fmt: skip


def _compiled(target: Path) -> Path:
    sources = sorted(str(path) for path in AGENT.glob("*.c"))
    _run(["cc", "-static", "-Os", "-std=gnu11", "-Wall", "-o", str(target), *sources])
    return target


def bare_kernel(packed: bytes) -> bytes:
    """The ELF file inside of a bzImage, so that the machine starts it without unpacking it each time.

    Raises:
        DriverUnavailable: not a bzImage, or packed in a way that no tool here unpacks.
    """
    if packed[:4] == b"\x7fELF":
        return packed
    if packed[0x202:0x206] != b"HdrS":
        raise DriverUnavailable("the kernel is neither an ELF file nor a bzImage")
    sectors = packed[0x1F1] or 4
    offset, length = (int.from_bytes(packed[at : at + 4], "little") for at in (0x248, 0x24C))
    start = (sectors + 1) * 512 + offset
    # Behind the packed kernel stands its unpacked size.
    payload = packed[start : start + length]
    kernel = _unpack(payload, int.from_bytes(payload[-4:], "little"))
    if kernel[:4] != b"\x7fELF":
        raise DriverUnavailable("the kernel's payload is no ELF file")
    return kernel


def _with_tool(*command: str) -> Callable[[bytes], bytes]:
    return lambda data: _run(command, stdin=data, check=False)


_UNPACKERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x02\x21\x4c\x18": _with_tool("lz4", "-dc"), b"\x28\xb5\x2f\xfd": _with_tool("zstd", "-dc"), b"\x1f\x8b": gzip.decompress,
    b"\xfd7zXZ\0": lambda data: lzma.LZMADecompressor().decompress(data), b"BZh": bz2.decompress,
    b"\x5d\0\0": lambda data: lzma.LZMADecompressor().decompress(data),
}  # fmt: skip


def _unpack(data: bytes, size: int | None = None) -> bytes:
    for magic, unpack in _UNPACKERS.items():
        if data.startswith(magic):
            whole = unpack(data[: -4 if size is not None else None])
            if size is not None and len(whole) != size:
                raise DriverUnavailable(f"the kernel unpacks to {len(whole)} bytes where {size} belong")
            return whole
    return data
