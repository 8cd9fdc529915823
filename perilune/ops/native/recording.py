"""A stretch of torch operations and C kernels, recorded while it runs and repeated without the Python in between.

Decoding a small model on a CPU spends most of its time in Python: modules, checks of shapes, choices of kernels, which
come out the same in every step. A recording keeps what reached the processor: each C call with its arguments, and each
torch operation that computes something, with every tensor that they touched. Repeating it writes the same memory again,
so the inputs are changed in place before, and the outputs are read from where they were. It is what a CUDA graph is on
a GPU, with the same conditions: shapes and the way through the code must not depend on the numbers, and tensors that it
reads, weights for instance, are changed in place only.

    with record() as recorder:
        y = model(x)
    recording = recorder.finish()      # NotRecordable says what stands in the way
    x.copy_(other); recording.replay() # y holds model(other)
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perilune.ops.native import build

_ALLOCATE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
# Numbers that go to the host or come from it: what follows could be another way, or a constant that is none.
_HOST = {"_local_scalar_dense", "item", "equal", "is_nonzero", "resolve_conj", "lift_fresh"}

_recording = threading.Lock()
_plain_call = ctypes._CFuncPtr.__call__  # type: ignore[attr-defined]


class NotRecordable(Exception):
    """What was run cannot be repeated by a recording; the message says why."""


class Recording:
    """What was recorded.

    Args:
        steps: calls in order; those of C return nothing or 0.
        kept: tensors whose memory they use.

    Attributes:
        nbytes: of the tensors that were made while it was recorded.
    """

    def __init__(self, steps: list[Callable[[], Any]], kept: list[Tensor], nbytes: int) -> None:
        self._steps, self._kept, self.nbytes = steps, kept, nbytes

    def __len__(self) -> int:
        return len(self._steps)

    def replay(self) -> None:
        """Do it again, on what the tensors hold now.

        Raises:
            MemoryError: a kernel failed; the only way in which they do is to find no memory.
        """
        for step in self._steps:
            status = step()
            if status.__class__ is int and status:
                raise MemoryError("a recorded kernel found no memory for its working space")


class Recorder(TorchDispatchMode):
    """Listens to torch; see `record`.

    Attributes:
        nbytes: of the tensors made so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], Any]] = []
        self._kept: list[Tensor] = []
        self.nbytes = 0
        self._obstacle: str | None = None

    def finish(self) -> Recording:
        """The recording of what ran in the block.

        Raises:
            NotRecordable: something in it depends on more than the tensors' memory.
        """
        if self._obstacle is not None:
            raise NotRecordable(self._obstacle)
        return Recording(self._steps, self._kept, self.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note it if it computes."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in _HOST:
            self._obstacle = self._obstacle or f"{func} passes numbers between host and tensors"
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self._obstacle = self._obstacle or f"{func} draws random numbers"
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch.Tag.dynamic_output_shape in func.tags and (
            name != "index" or any(x.dtype is torch.bool for x in given)
        ):
            self._obstacle = self._obstacle or f"the host learns from {func} how many numbers there are"
        known = {_storage(tensor) for tensor in given}
        fresh = [tensor for tensor in made if tensor.numel() and _storage(tensor) not in known]
        if func._schema.is_mutable:
            self._steps.append(partial(func, *args, **kwargs))
        elif fresh and name not in _ALLOCATE:
            self._steps.append(_into(out, func, args, kwargs))
        self._kept += given
        self._kept += made
        self.nbytes += sum(tensor.untyped_storage().nbytes() for tensor in fresh)
        return out

    def called(self, function: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """A C function was called."""
        if result:
            self._obstacle = self._obstacle or f"{function.__name__} returned {result!r}"
        self._steps.append(partial(function, *arguments))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _into(out: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Compute an operation again, into the tensors that it gave."""
    writing = getattr(func._overloadpacket, "out", None)
    if isinstance(out, Tensor) and writing is not None:
        names = [argument.name for argument in writing._schema.arguments]
        if names == [*(argument.name for argument in func._schema.arguments), "out"]:
            return partial(writing, *args, **kwargs, out=out)

    def again() -> None:
        for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)

    return again


@contextmanager
def record() -> Iterator[Recorder]:
    """Record what this thread does in the block: torch operations on the CPU, and C functions of this folder.

    Run the same before it once, so that libraries are loaded. One recording is made at a time in a process; others wait.
    Everything that runs later in the recording's place must be in the same grad or inference mode.
    """
    recorder, thread = Recorder(), threading.get_ident()

    def call(function: Any, *arguments: Any) -> Any:
        result = _plain_call(function, *arguments)
        if threading.get_ident() == thread:
            recorder.called(function, arguments, result)
        return result

    with _recording:
        kinds: set[Any] = {library._FuncPtr for library in build.libraries()}
        for kind in kinds:
            kind.__call__ = call
        try:
            with recorder:
                yield recorder
        finally:
            for kind in kinds:
                del kind.__call__
