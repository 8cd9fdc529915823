"""One model in this process, shared by everybody in it: requests become jobs, and all jobs run together.

`Prompts` reads and checks what is asked, `LocalEngine` makes jobs of it, and `EngineCore` runs them on its own thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from perilune.errors import RequestError
from perilune.model import Transformer
from perilune.ops.first_use import listen
from perilune.serve import structured
from perilune.serve.administration import Administration, metrics
from perilune.serve.answer import Answer
from perilune.serve.cache import HybridCache, Retention
from perilune.serve.core import EngineCore
from perilune.serve.engine import EngineMetrics
from perilune.serve.images import PlacedImage, ShownImages
from perilune.serve.job import LocalJob
from perilune.serve.overlap import pays_off
from perilune.serve.prefix_names import PrefixNames
from perilune.serve.prompts import Prompts
from perilune.serve.reader import ChatReader, Reader, TextReader
from perilune.serve.request import ChatOptions, FieldError, SamplingParams, Service, Structured
from perilune.serve.runner import ModelRunner, PagePool, pool_geometry
from perilune.serve.sampling import SamplingRow
from perilune.serve.schedule import Scheduler
from perilune.serve.schedule import Sequence as Scheduled
from perilune.serve.settings import EngineSettings
from perilune.serve.tiers import DiskTier, Tiers
from perilune.serve.warm_up import FirstUses, Progress, warm_up
from perilune.serve.worker import JobLoop
from perilune.tokenizer import Tokenizer
from perilune.tokenizer.xtml.grammar_mask import TokenMask


class LocalEngine:
    """An engine over a model in this process; may be used from any thread, and by many at once.

    Args:
        model: in eval mode from now on; its device and compute dtype are used as they are.
        tokenizer: of the same run.
        name: the model's name for clients.
        thinking: whether the model was taught the think channel; a model without a chat stage was not, and its
            generation prompt opens the response at once.
        images: makes images ready; None = the model takes none.
        context_length: most tokens of a prompt and its answer together; K3's layers have no positions, so this limits
            memory and time, not the model.
        settings: see `EngineSettings`.

    Attributes:
        core: the thread that runs it.
        admin: looking inside, pausing, pins, new weights.
        prefixes: names under which is cached what the model computes.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        name: str,
        thinking: bool = False,
        images: ShownImages | None = None,
        context_length: int = 8192,
        settings: EngineSettings | None = None,
    ) -> None:
        self.tokenizer, self.name, self.thinking, self.images = tokenizer, name, thinking, images
        self.context_length = context_length
        self.settings = settings or EngineSettings()
        geometry = pool_geometry(model.cfg, model.compute_dtype, unit=self.settings.hash_unit, device=model.device)
        free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else None
        pages = self.settings.pages(geometry, context_length, free)
        cache = HybridCache(geometry, pages, Retention.parse(self.settings.retention), self.settings.eviction)
        pool = PagePool(model.cfg, geometry, pages, model.compute_dtype, model.device)
        limits = self.settings.limits(geometry, context_length, model.device.type)
        runner = ModelRunner(
            model, pool, tokenizer.vocab_size, deterministic=self.settings.deterministic,
            most_rows=limits.sequences, most_tokens=limits.step_tokens,
            longest=context_length, graphs=self.settings.cuda_graphs,
        )  # fmt: skip
        tiers = None
        if self.settings.host_bytes or self.settings.disk is not None:
            sizes = (geometry.page_bytes, geometry.groups * geometry.page_bytes)
            disk = None
            if self.settings.disk is not None:
                disk = DiskTier(self.settings.disk, self.settings.disk_bytes, *sizes)
            tiers = Tiers(cache, pool, self.settings.host_bytes, disk)
        overlap = pays_off(model.device) if self.settings.overlap is None else self.settings.overlap
        scheduler = Scheduler(cache, limits, ahead=overlap)
        self.core = EngineCore(cache, scheduler, runner, tiers)
        self.first_uses = FirstUses()
        listen(self.first_uses)
        self.prefixes = PrefixNames(
            model, name, geometry.unit, lasting=self.settings.disk is not None, shared=self.settings.prefix_cache
        )
        self.admin = Administration(self.core, self.prefixes, images)
        self._ends = (tokenizer.special.eos, tokenizer.special.end_of_msg)
        self._names = itertools.count()
        self._prompts = Prompts(tokenizer, name, thinking, images, context_length)
        # The thread keeps the model alive; it ends with the engine, whether or not somebody closes it.
        self._finalizer = weakref.finalize(self, self.core.close, 0.0)

    def close(self, timeout: float | None = 10.0, *, keep: bool = True) -> None:
        """End the thread; jobs that run end with an error.

        Args:
            timeout: seconds to wait for its end, which may take as long as a step and writing the cache to the disk; None =
                as long as it takes. The end of the process waits for some time more.
            keep: write what is cached to the disk tier, if there is one.
        """
        if not keep and self.core.tiers is not None:
            self.core.tiers.abandon()
        self.core.close(timeout)

    def warm_up(self, progress: Progress | None = None) -> float:
        """See `Engine.warm_up`; returns the seconds it took. With the setting "lazy" nothing is done.

        Args:
            progress: see `warm_up.Progress`.

        Raises:
            EngineClosed: the engine was closed meanwhile.
        """
        if self.settings.warm_up == "lazy":
            return 0.0
        with contextlib.suppress(RequestError):  # without the extra there are no grammars
            structured.text_mask(self.tokenizer, Structured("choice", ["a"])).start().mask()
        rare = self.settings.warm_up == "full"
        if rare and self.images is not None and self.core.runner.launches:
            with contextlib.suppress(ImportError):  # nor pictures
                self.images.warm_up()
        seconds = warm_up(self.core, self.tokenizer.vocab_size, progress, rare=rare)
        self.first_uses.begin()
        return seconds

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold pictures."""
        return self.images is not None

    @property
    def ready(self) -> bool:
        """Whether it takes requests and works on them."""
        return not self.core.closed and not self.core.paused

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests, for good."""
        return self.core.closed

    def metrics(self) -> EngineMetrics:
        """A snapshot of counts."""
        return metrics(self.core, self.first_uses)

    # ---- requests

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        n: int = 1,
        options: ChatOptions | None = None,
        service: Service | None = None,
    ) -> LocalJob:
        """See `Engine.chat`."""
        weights = self.prefixes.weights_number
        options = options or ChatOptions()
        thinking = self._prompts.thinks(options)
        rendered, images = self._prompts.rendered(messages, options)
        params = self._prompts.fit(rendered.ids, params, "messages")
        added = [tool for message in messages for tool in message.get("tools") or ()]
        tools = [*options.tools, *added]
        mask = self._prompts.mask(tools, options, params, thinking=thinking)
        names = [tool["function"]["name"] for tool in tools]
        reader = functools.partial(
            ChatReader, self.tokenizer, params.stop, thinking=thinking, tools=names, include_stop=params.include_stop,
            show_calls=bool(tools) and options.tool_choice != "none",
        )  # fmt: skip
        placed = self.images.placed(rendered, images) if self.images is not None and images else []
        return self._job(
            [rendered.ids], params, n, reader, mask, service, weights, turn_ends=rendered.message_ends, images=placed
        )

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        service: Service | None = None,
    ) -> LocalJob:
        """See `Engine.complete`."""
        weights = self.prefixes.weights_number
        rows = [self._prompts.ids(prompt) for prompt in prompts]
        if not rows:
            raise FieldError("there is no prompt; give at least one", "prompt")
        params = self._prompts.fit(max(rows, key=len), params, "prompt")
        mask = structured.text_mask(self.tokenizer, params.structured) if params.structured is not None else None
        reader = functools.partial(TextReader, self.tokenizer, params.stop, include_stop=params.include_stop)
        return self._job(rows, params, n, reader, mask, service, weights)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """See `Engine.prompt_ids`."""
        return self._prompts.rendered(messages, options or ChatOptions(), add_generation_prompt)[0].ids

    def loop(self, max_waiting: int) -> JobLoop:
        """See `Engine.loop`."""
        return JobLoop(max_waiting)

    def _job(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        reader: Callable[[], Reader],
        mask: TokenMask | None,
        service: Service | None,
        weights: int,
        *,
        turn_ends: Sequence[int] = (),
        images: Sequence[PlacedImage] = (),
    ) -> LocalJob:
        """A job with `n` answers to each prompt. The first of them computes the prompt, the others follow it."""
        if not isinstance(n, int) or n < 1:
            raise FieldError(f"n={n!r} must be a whole number of at least 1", "n")
        service = service or Service()
        sequences, leaders = [], []
        for index, ids in enumerate(prompts):
            for choice in range(n):
                name = f"s{next(self._names)}"
                sampling = SamplingRow(params, ids, stream=choice, ends=self._ends)
                constraint = None if mask is None else mask.start()
                answer = Answer(index * n + choice, params, reader(), sampling, constraint, images)
                chain = self.prefixes.chain(name, answer, ids, images, service)
                sequence = Scheduled(
                    name, ids, chain, turn_ends=turn_ends, priority=service.priority, content=answer,
                    extends_chain=not self.settings.deterministic, longest=len(ids) + params.max_tokens,
                )  # fmt: skip
                sequences.append(sequence)
                if choice == 0:
                    leaders.append(sequence)
                else:
                    leaders[-1].followers.append(sequence)
        return LocalJob(self, sequences, leaders, service, weights)
