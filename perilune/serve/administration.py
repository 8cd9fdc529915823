"""What an operator may do to a running engine: look inside, pause, pin prefixes, forget, change the weights."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from perilune.errors import CheckpointError, ConfigError
from perilune.serve.cache import TokenChain
from perilune.serve.cache.block_pool import BOUND, FREE, HELD, STATE, TOKENS, BlockPool
from perilune.serve.cache.lease import Pin
from perilune.serve.core import EngineCore
from perilune.serve.engine import CacheEvent, EngineMetrics
from perilune.serve.images import ShownImages
from perilune.serve.prefix_names import PrefixNames
from perilune.serve.warm_up import FirstUses

_KINDS = {FREE: "free", TOKENS: "tokens", STATE: "state"}


class Administration:
    """Commands to an engine; each runs between two steps, on the engine's thread, and returns when it is done.

    Args:
        core: of the engine.
        prefixes: names of what is cached.
        images: of the same model, if it takes any.

    Attributes:
        weights_version: name of the weights, as `update_weights` was told.
    """

    def __init__(self, core: EngineCore, prefixes: PrefixNames, images: ShownImages | None) -> None:
        self._core, self._prefixes, self._images = core, prefixes, images
        self.weights_version = "0"
        self._pins: dict[str, tuple[Pin, float]] = {}
        self._names = itertools.count()

    def pause(self) -> None:
        """Finish the step under way and start no other; requests wait."""
        self._core.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._core.resume()

    def abort(self, request_id: str | None = None) -> int:
        """Stop the jobs with this id, or all; returns how many."""

        def stop() -> int:
            chosen = [job for job in self._core.jobs.values() if request_id in (None, job.request_id)]
            for job in chosen:
                job.close()
            return len(chosen)

        return self._core.call(stop)

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes, pins too; requests run on. Returns the pages that came free."""

        def reset() -> int:
            cache = self._core.cache
            before = cache.store.pool.free
            for name in list(self._pins):
                self._drop(name)
            cache.reset()
            return cache.store.pool.free - before

        return self._core.call(reset)

    def update_weights(self, path: str | Path, version: str) -> None:
        """Load other weights of the same model. Requests that run start again with them, and no old state is a hit.

        Args:
            path: a checkpoint folder with safetensors files.
            version: name of the weights from now on.

        Raises:
            CheckpointError: no such file, or tensors of other names or shapes; nothing was changed then.
        """
        tensors = _read(Path(path), self._core.runner.model)

        def load() -> None:
            with torch.no_grad():
                for name, tensor in self._core.runner.model.state_dict().items():
                    tensor.copy_(tensors[name])
            self._renew(version)

        self._core.call(load)

    def weights_changed(self, version: str) -> None:
        """The model's parameters were changed in place, as by a trainer in this process: as `update_weights`."""

        self._core.call(lambda: self._renew(version))

    def _renew(self, version: str) -> None:
        """Let nothing that the old weights computed be used: running sequences start again, under new names of prefixes."""
        self._prefixes.weights_changed()
        if self._images is not None:
            self._images.forget()
        self.weights_version = version
        core = self._core
        for sequence in list(core.scheduler.running.values()):
            core.scheduler.preempt(sequence)
        for name in list(self._pins):
            self._drop(name)
        core.cache.reset()
        for job in core.jobs.values():
            self._prefixes.rename(job)

    def pin(self, ids: Sequence[int], seconds: float, salt: str = "") -> dict[str, Any]:
        """Keep the longest cached part of a prompt for so many seconds; returns its name and length."""

        def hold() -> dict[str, Any]:
            self._expire()
            pin = self._core.cache.pin(self._chain(ids, salt))
            if pin is None:
                return {"name": None, "tokens": 0}
            name = f"pin{next(self._names)}"
            self._pins[name] = pin, time.monotonic() + seconds
            return {"name": name, "tokens": pin.tokens}

        return self._core.call(hold)

    def unpin(self, name: str) -> None:
        """Undo a `pin` before its time. ConfigError: there is none of this name."""

        def let_go() -> None:
            self._expire()
            if name not in self._pins:
                raise ConfigError(f"there is no pin {name!r}; there are: {', '.join(self._pins) or 'none'}")
            self._drop(name)

        self._core.call(let_go)

    def _expire(self) -> None:
        for name, (_, until) in list(self._pins.items()):
            if until < time.monotonic():
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._core.cache.unpin(self._pins.pop(name)[0])

    def explain(self, ids: Sequence[int], salt: str = "") -> dict[str, Any]:
        """Why a prompt hits as deep as it does, component by component; `text` says it in words."""

        def look() -> dict[str, Any]:
            report = self._core.cache.explain(self._chain(ids, salt))
            return asdict(report) | {"text": str(report)}

        return self._core.call(look)

    def _chain(self, ids: Sequence[int], salt: str) -> TokenChain:
        return TokenChain(self._prefixes.root_key(salt), self._core.cache.geometry.unit, ids)

    def check_invariants(self) -> list[str]:
        """What is wrong with the cache's bookkeeping; empty = nothing."""

        def check() -> list[str]:
            try:
                self._core.cache.check_invariants()
            except AssertionError as error:
                return [str(error)]
            return []

        return self._core.call(check)

    def page_map(self) -> list[dict[str, Any]]:
        """Of each page what it holds, whether running requests hold it, and whether it is cached."""

        return self._core.call(lambda: describe_pages(self._core.cache.store.pool))

    def cache_events(self, since: int = 0) -> list[CacheEvent]:
        """How the last requests met the cache: those with a number above `since`, oldest first."""
        return self._core.call(lambda: [event for event in self._core.events if event.number > since])


def describe_pages(pool: BlockPool) -> list[dict[str, Any]]:
    """Of each page what it holds, whether running requests hold it, and whether it is cached."""
    marks = [pool.mark(page) for page in range(pool.pages)]
    return [{"kind": _KINDS[m & 3], "held": bool(m & HELD), "cached": bool(m & BOUND)} for m in marks]


def metrics(core: EngineCore, first_uses: FirstUses) -> EngineMetrics:
    """A snapshot, taken on the engine's thread."""

    def look() -> EngineMetrics:
        scheduler, totals, cache = core.scheduler, core.totals, core.cache.metrics()
        counters, waiting = cache.counters, dict.fromkeys((kind.name for kind in scheduler.limits.classes), 0)
        for sequence in scheduler.queues:
            waiting[scheduler.limits.classes[sequence.kind].name] += 1
        return EngineMetrics(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            waiting_by_class=waiting,
            steps_total=totals.steps,
            failed_steps_total=totals.failed,
            preempted_total=scheduler.preempted,
            prompt_tokens_total=counters.prompt_tokens,
            cached_tokens_total=counters.tokens_hit,
            recomputed_below_kv_tokens_total=counters.tokens_without_state,
            missed_tokens_total=counters.tokens_missed,
            generated_tokens_total=totals.generated,
            model_tokens_total=core.runner.tokens_run,
            pages_total=cache.pages,
            pages_free=cache.free,
            pages_cached=cache.tokens_cached + cache.state_cached,
            pages_used=cache.pages - cache.free - cache.evictable,
            page_bytes=cache.page_bytes,
            checkpoints_created_total=counters.checkpoints_created,
            checkpoints_used_total=counters.checkpoints_used,
            checkpoints_evicted_total=counters.checkpoints_evicted,
            scheduler_seconds_total=totals.scheduler_seconds,
            step_seconds_total=totals.step_seconds,
            wait_seconds_total=totals.wait_seconds,
            overlapped_steps_total=totals.overlapped,
            compilations_total=first_uses.count,
            compilation_seconds_total=first_uses.seconds,
            tiers=core.tiers.metrics() if core.tiers is not None else {},
        )

    return core.call(look)


def _read(path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors for every entry of a model's state. CheckpointError: one is missing, or has another shape."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("model-*.safetensors")) if path.is_dir() else [path]
    found: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            found |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the weights in {path}: {error}") from None
    for name, tensor in model.state_dict().items():
        if name not in found:
            raise CheckpointError(f"{path} has no tensor {name}; give a checkpoint of the model that is served")
        if found[name].shape != tensor.shape:
            raise CheckpointError(f"{path}: {name} is {list(found[name].shape)}, the model's is {list(tensor.shape)}")
    return found
