"""A Python session in a guest whose state outlives its process: values, definitions, and arenas of memory with tracked writes.

The program is put into the guest whole (`sandbox/session.py`) and uses the standard library only. One JSON object a line:
`{"code": …}` in, `{"output", "error", "value", "unkept"}` out. What a cell leaves behind is kept in /dev/shm/arena:

    session        numbers, text, bytes, and lists, tuples, sets and dicts of those, as JSON; the sources of functions, classes and
                   imports; the list of blocks. Renamed into place after each cell
    heap           `arena.block(name, size)`: bytes that stay where they are, for numbers too large to write down after each cell

A new session on a restored sandbox finds both and goes on. What cannot be kept (open files, threads, objects) is named in `unkept`.
"""

import ast
import contextlib
import ctypes
import fcntl
import io
import json
import mmap
import os
import struct
import sys
import traceback

FOLDER = "/dev/shm/arena"
NUMBERS = {"x86_64": 323, "aarch64": 282}
API, REGISTER = 0xC018AA3F, 0xC020AA00
FEATURES = 1 << 12 | 1 << 13 | 1 << 15
"""Write protection of shared memory, of pages that are not there yet, and without faults that anybody must answer."""
PAGE = 4096


def encoded(value):
    """A value as JSON has it: what it has no word for becomes [kind, content]. Raises TypeError for what is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encoded(one) for one in value]]
    if kind is dict:
        return ["dict", [[encoded(key), encoded(one)] for key, one in value.items()]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    raise TypeError(f"{kind.__name__} is not plain data")


_KINDS = {
    "list": lambda parts: [decoded(part) for part in parts], "tuple": lambda parts: tuple(decoded(part) for part in parts),
    "set": lambda parts: {decoded(part) for part in parts}, "frozenset": lambda parts: frozenset(decoded(part) for part in parts),
    "dict": lambda pairs: {decoded(key): decoded(value) for key, value in pairs}, "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex, "complex": lambda parts: complex(*parts),
}  # fmt: skip


def decoded(value):
    """The inverse of `encoded`."""
    return _KINDS[value[0]](value[1]) if isinstance(value, list) else value


class Arena:
    """Blocks of memory by name, one behind the other in a file that is mapped for the session's life.

    Args:
        size: bytes of the file, holes until they are written.
    """

    def __init__(self, size):
        os.makedirs(FOLDER, mode=0o700, exist_ok=True)
        self.blocks = {}
        fd = os.open(f"{FOLDER}/heap", os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, size)
        self.size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        os.close(fd)
        self._view = memoryview(self._map)
        self.tracked = self._track()

    def _track(self):
        """Ask the kernel to note which pages are written; returns "" or why it will not."""
        self._description = f"{FOLDER}/heap.map"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._description)
        number = NUMBERS.get(os.uname().machine)
        if number is None:
            return "no call number for this processor"
        libc = ctypes.CDLL(None, use_errno=True)
        self._faults = libc.syscall(number, 1 | os.O_CLOEXEC | os.O_NONBLOCK)
        if self._faults < 0:
            return f"userfaultfd: {os.strerror(ctypes.get_errno())}"
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        try:
            fcntl.ioctl(self._faults, API, bytearray(struct.pack("QQQ", 0xAA, FEATURES, 0)))
            fcntl.ioctl(
                self._faults, REGISTER, bytearray(struct.pack("QQQQ", start, -(-self.size // PAGE) * PAGE, 2, 0))
            )
        except OSError as error:
            return f"userfaultfd: {error.strerror}; Linux 6.7 can"
        _write(self._description, json.dumps(
            {"pid": os.getpid(), "start": start, "size": self.size, "serial": int.from_bytes(os.urandom(6), "little")}
        ).encode())  # fmt: skip
        return ""

    def block(self, name, size=None):
        """Bytes of this name as a writable memoryview: those that are there, or `size` new ones, zero."""
        if name not in self.blocks:
            if size is None:
                raise KeyError(f"no block {name!r}; blocks: {', '.join(self.blocks) or 'none'}")
            at = max((start + length for start, length in self.blocks.values()), default=0)
            at = -(-at // PAGE) * PAGE
            if size < 0 or at + size > self.size:
                raise MemoryError(f"a block of {size} bytes does not fit: {self.size - at} of {self.size} are free")
            self.blocks[name] = (at, size)
        at, length = self.blocks[name]
        if size is not None and size != length:
            raise ValueError(f"block {name!r} has {length} bytes, not {size}")
        return self._view[at : at + length]


class Session:
    """The namespace that cells run in."""

    def __init__(self, arena_bytes):
        self.arena = Arena(arena_bytes)
        self.names = {"__name__": "__main__", "arena": self.arena}
        self.sources = {}
        with contextlib.suppress(FileNotFoundError), open(f"{FOLDER}/session", "rb") as file:
            kept = json.loads(file.read())
            values, self.sources = {name: decoded(value) for name, value in kept["values"].items()}, kept["sources"]
            self.arena.blocks = {name: tuple(place) for name, place in kept["blocks"].items()}
            for source in self.sources.values():
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(source, self.names)
            self.names.update(values)

    def run(self, code):
        """Run one cell and keep what it leaves; returns the reply."""
        output, error, value = io.StringIO(), None, None
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                exec(compile(tree, "<cell>", "exec"), self.names)
                if last is not None:
                    found = eval(compile(ast.Expression(last.value), "<cell>", "eval"), self.names)
                    value = None if found is None else repr(found)
            self._note_sources(tree, code)
        except BaseException:
            error = traceback.format_exc(limit=-3)
        return {"output": output.getvalue(), "error": error, "value": value, "unkept": self._keep()}

    def _note_sources(self, tree, code):
        """Definitions and imports are kept as text: the last one of each name."""
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                bound = [node.name]
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                bound = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            else:
                continue
            text = ast.get_source_segment(code, node) or ast.unparse(node)
            decorators = [f"@{ast.unparse(one)}\n" for one in getattr(node, "decorator_list", ())]
            for name in bound:
                self.sources.pop(name, None)
                self.sources[name] = "".join(decorators) + text

    def _keep(self):
        """Write down what can be; returns the names of what cannot."""
        values, unkept = {}, []
        for name, value in self.names.items():
            if name.startswith("__") or name == "arena":
                continue
            try:
                values[name] = encoded(value)
            except (TypeError, RecursionError):
                if name not in self.sources:
                    unkept.append(name)
        self.sources = {name: source for name, source in self.sources.items() if name in self.names}
        kept = {"values": values, "sources": self.sources, "blocks": self.arena.blocks}
        _write(f"{FOLDER}/session", json.dumps(kept).encode())
        return sorted(unkept)


def _write(path, data):
    with open(f"{path}.new", "wb") as file:
        file.write(data)
    os.replace(f"{path}.new", path)


def main():
    session = Session(int(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What a child of a cell prints is no reply.
    print(json.dumps({"ready": True, "tracked": session.arena.tracked}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(session.run(json.loads(line)["code"])), file=replies, flush=True)


if __name__ == "__main__":
    main()
