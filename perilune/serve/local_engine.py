"""One model in this process, shared by everybody in it: requests become jobs, and all jobs run together.

`LocalEngine` makes prompts and checks them; `EngineCore` runs them on its own thread.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import operator
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from perilune.data.image import ProcessedImage
from perilune.errors import RequestError
from perilune.model import Transformer
from perilune.ops.first_use import listen
from perilune.serve import structured
from perilune.serve.administration import Administration, metrics
from perilune.serve.answer import Answer
from perilune.serve.cache import HybridCache, KnownPrompts, Retention, RootKey, TokenChain
from perilune.serve.core import EngineCore
from perilune.serve.engine import EngineMetrics
from perilune.serve.images import PlacedImage, ShownImages, sizes
from perilune.serve.job import LocalJob
from perilune.serve.overlap import pays_off
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
from perilune.tokenizer.xtml import render
from perilune.tokenizer.xtml.grammar import answer_mask, needs_grammar
from perilune.tokenizer.xtml.grammar_mask import TokenMask
from perilune.tokenizer.xtml.render import Rendered


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
        self._identity = name
        tiers = None
        if self.settings.host_bytes or self.settings.disk is not None:
            sizes = (geometry.page_bytes, geometry.groups * geometry.page_bytes)
            disk = None
            if self.settings.disk is not None:  # it may have been written by other weights of the same name
                self._identity = self._identified(model)
                disk = DiskTier(self.settings.disk, self.settings.disk_bytes, *sizes)
            tiers = Tiers(cache, pool, self.settings.host_bytes, disk)
        overlap = pays_off(model.device) if self.settings.overlap is None else self.settings.overlap
        scheduler = Scheduler(cache, limits, ahead=overlap)
        self.core = EngineCore(cache, scheduler, runner, tiers)
        self.first_uses = FirstUses()
        listen(self.first_uses)
        self.admin = Administration(self.core, self.root_key, self._weights_changed)
        self._ends = (tokenizer.special.eos, tokenizer.special.end_of_msg)
        self._names, self._known = itertools.count(), KnownPrompts()
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

    def root_key(self, salt: str = "") -> RootKey:
        """What a cached state depends on besides tokens and images."""
        model = self.core.runner.model
        numerics = f"{model.compute_dtype} {model.device.type}"
        return RootKey(model=self._identity, weights=self.admin.weights_number, numerics=numerics, salt=salt)

    def _identified(self, model: Transformer) -> str:
        """What the weights are called where another process may look for them."""
        return f"{self.name} {fingerprint(model)}"

    def _weights_changed(self) -> None:
        """The model has other weights; called before they get their number."""
        if self.settings.disk is not None:  # where the number says nothing: every process counts from 0
            self._identity = self._identified(self.core.runner.model)
        if self.images is not None:
            self.images.forget()

    def rename(self, job: LocalJob) -> None:
        """Let a job that was made for earlier weights be cached under the name of those that compute it."""
        job.weights = self.admin.weights_number
        for sequence in job.sequences:
            answer = sequence.content
            # Rows of its images are what the earlier weights saw: they serve this job, and nobody else.
            alone = bool(answer.images) or self._alone(answer)
            root = self._root(sequence.name, alone, job.service)
            keys = [image.key for image in answer.images]
            sequence.chain = TokenChain(root, self.core.cache.geometry.unit, sequence.ids, keys)

    def _alone(self, answer: Answer) -> bool:
        """Whether an answer shares no prefix: scores of every token of a prompt need every token of it."""
        return not self.settings.prefix_cache or answer.wants_prompt_scores

    def _root(self, name: str, alone: bool, service: Service) -> RootKey:
        return self.root_key(f"{name} alone" if alone else service.cache_salt)

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
        weights = self.admin.weights_number
        options = options or ChatOptions()
        thinking = self._thinks(options)
        rendered, images = self._rendered(messages, options)
        params = self._fit(rendered.ids, params, "messages")
        added = [tool for message in messages for tool in message.get("tools") or ()]
        tools = [*options.tools, *added]
        mask = self._mask(tools, options, params, thinking=thinking)
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
        weights = self.admin.weights_number
        rows = [self._prompt_ids(prompt) for prompt in prompts]
        if not rows:
            raise FieldError("there is no prompt; give at least one", "prompt")
        params = self._fit(max(rows, key=len), params, "prompt")
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
        return self._rendered(messages, options or ChatOptions(), add_generation_prompt)[0].ids

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
                root = self._root(name, self._alone(answer), service)
                chain = self._known.chain(root, self.core.cache.geometry.unit, ids, [image.key for image in images])
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

    # ---- checks

    def _thinks(self, options: ChatOptions) -> bool:
        thinking = self.thinking if options.thinking is None else options.thinking
        if (thinking or options.effort is not None) and not self.thinking:
            raise FieldError(
                "this model was not taught to think; leave reasoning_effort and thinking out", "reasoning_effort"
            )
        return thinking

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, add_generation_prompt: bool = True
    ) -> tuple[Rendered, list[ProcessedImage]]:
        """The tokens of a conversation, and the images in it."""
        if isinstance(messages, str | Mapping) or not all(isinstance(one, Mapping) for one in messages):
            raise FieldError(
                f'messages is {repr(messages)[:80]}; give a list of messages, such as {{"role": "user", "content": "Hi"}}',
                "messages",
            )
        images = self._images(messages)
        with _naming_fields():
            rendered = render(
                self.tokenizer, messages, tools=options.tools, thinking=self._thinks(options), effort=options.effort,
                images=sizes(images), tool_choice=options.tool_choice, response_format=options.response_format,
                add_generation_prompt=add_generation_prompt,
            )  # fmt: skip
        return rendered, images

    def _images(self, messages: Sequence[Mapping[str, Any]]) -> list[ProcessedImage]:
        """The images of a conversation, decoded.

        Raises:
            FieldError: one cannot be read, or the model takes no images.
        """
        if self.images is None:
            parts = [
                part for message in messages for part in _parts(message) if str(part.get("type")).startswith("image")
            ]
            if parts:
                raise FieldError(
                    f"{self.name} has no vision tower and takes no images; send text, or use a run of `perilune demo --vision`",
                    "messages",
                )
            return []
        with _naming_fields():
            return self.images.load(messages)

    def _mask(
        self, tools: Sequence[Mapping[str, Any]], options: ChatOptions, params: SamplingParams, *, thinking: bool
    ) -> TokenMask | None:
        """The grammar of a request that needs one."""
        choice, form = options.tool_choice, options.response_format
        more = {}
        if params.structured is not None:
            more = {"response": functools.partial(structured.rule, params.structured)}
        elif not needs_grammar(tools, choice, form, parallel=options.parallel_tool_calls):
            return None
        field = "tools" if form is None else "response_format"
        with _naming_fields(field if params.structured is None else structured.FIELD):
            return answer_mask(
                self.tokenizer, thinking=thinking, tools=tools, tool_choice=choice, response_format=form,
                parallel=options.parallel_tool_calls, **more,
            )  # fmt: skip

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            try:
                ids = [int(operator.index(token_id)) for token_id in prompt]
            except TypeError:
                raise FieldError(
                    f"prompt is {repr(prompt)[:80]}; give a text or a list of token ids, which are whole numbers",
                    "prompt",
                ) from None
            for token_id in ids:
                if not 0 <= token_id < self.tokenizer.vocab_size:
                    raise FieldError(
                        f"prompt has the token id {token_id}; this model's ids are 0..{self.tokenizer.vocab_size - 1}",
                        "prompt",
                    )
        if not ids:  # no context predicts how a document begins, so nothing was learned about it
            raise FieldError("the prompt is empty; give at least the first word of the text", "prompt")
        return ids

    def _fit(self, ids: Sequence[int], params: SamplingParams, param: str) -> SamplingParams:
        params.check_vocabulary(self.tokenizer.vocab_size)
        room = self.context_length - len(ids)
        if room < 1:
            raise FieldError(
                f"{param} has {len(ids)} tokens, but prompt and answer together may have {self.context_length}; "
                "shorten it, or start the server with a larger --context",
                param,
                "context_length_exceeded",
            )
        most = min(params.max_tokens, room)
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a message's content that are tables; the renderer complains about others."""
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def fingerprint(model: Transformer) -> str:
    """A name that the model's weights decide: a hash of all their bytes."""
    hasher = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        hasher.update(f"{key} {tensor.dtype} {list(tensor.shape)} ".encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


@contextlib.contextmanager
def _naming_fields(field: str = "messages") -> Iterator[None]:
    """Errors of renderer and grammar begin with the path of what is wrong; clients get it as the field's name."""
    try:
        yield
    except RequestError as error:
        path = _FIELD.match(str(error))
        raise FieldError(str(error), path[0] if path else field) from None


_FIELD = re.compile(r"(?:messages|tools|tool_choice|response_format)[\w.\[\]$-]*\b\]?")
