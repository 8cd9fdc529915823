"""One model in this process: requests become jobs, and a job's text is pulled token by token."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune.data.image import ProcessedImage
from perilune.errors import RequestError
from perilune.serve.generator import Generation, Generator, Prefix
from perilune.serve.images import sizes
from perilune.serve.kept_states import KeptStates
from perilune.serve.reader import ChatReader, Reader, TextReader
from perilune.serve.request import ChatOptions, Delta, FieldError, SamplingParams, Service, Timing, Usage
from perilune.serve.worker import Worker
from perilune.tokenizer.xtml import render
from perilune.tokenizer.xtml.grammar import answer_mask, needs_grammar
from perilune.tokenizer.xtml.grammar_mask import TokenMask


class LocalEngine:
    """An engine over a model in this process.

    Jobs share the model and its kept states: iterate one at a time.

    Args:
        generator: model and tokenizer.
        name: the model's name for clients.
        thinking: whether the model was taught the think channel; a model without a chat stage was not, and its
            generation prompt opens the response at once.
        context_length: most tokens of a prompt and its answer together; K3's layers have no positions, so this limits
            memory and time, not the model.
        kept_states: most states kept between requests.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        name: str,
        thinking: bool = False,
        context_length: int = 8192,
        kept_states: int = 16,
    ) -> None:
        self.generator = generator
        self.tokenizer = generator.tokenizer
        self.name = name
        self.thinking = thinking
        self.context_length = context_length
        self.kept = KeptStates(kept_states)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        n: int = 1,
        options: ChatOptions | None = None,
        service: Service | None = None,
    ) -> LocalJob:
        """See `Engine.chat`."""
        options = options or ChatOptions()
        thinking = self.thinking if options.thinking is None else options.thinking
        if (thinking or options.effort is not None) and not self.thinking:
            raise FieldError(
                "this model was not taught to think; leave reasoning_effort and thinking out", "reasoning_effort"
            )

        images = self._images(messages)

        def prompt(messages: Sequence[Mapping[str, Any]], **more: Any) -> tuple[list[int], int]:
            rendered = render(
                self.tokenizer, messages, tools=options.tools, thinking=thinking, effort=options.effort,
                images=sizes(images), **more,
            )  # fmt: skip
            shown = self.generator.images
            return shown.placed(rendered, images) if shown and images else rendered.ids, rendered.message_ends[-1]

        with _naming_fields():
            ids, history = prompt(messages, tool_choice=options.tool_choice, response_format=options.response_format)
        params = self._fit(ids, params, "messages")
        added = [tool for message in messages for tool in message.get("tools") or ()]
        tools = [*options.tools, *added]
        mask = self._mask(tools, options, thinking=thinking)
        readers = [
            ChatReader(
                self.tokenizer, params.stop, thinking=thinking, tools=[tool["function"]["name"] for tool in tools],
                show_calls=bool(tools) and options.tool_choice != "none",
            )
            for _ in range(n)
        ]  # fmt: skip

        def turn(answer: Mapping[str, Any]) -> list[int]:
            return prompt([*messages, answer], add_generation_prompt=False)[0]

        return LocalJob(
            self, [ids], params, n, readers, mask=mask, history=history if options.one_shot else 0, turn=turn
        )

    def _images(self, messages: Sequence[Mapping[str, Any]]) -> list[ProcessedImage]:
        """The images of a conversation, decoded.

        Raises:
            FieldError: one cannot be read, or the model takes no images.
        """
        if self.generator.images is None:
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
            return self.generator.images.load(messages)

    def _mask(self, tools: Sequence[Mapping[str, Any]], options: ChatOptions, *, thinking: bool) -> TokenMask | None:
        """The grammar of a request that needs one."""
        choice, form = options.tool_choice, options.response_format
        if not needs_grammar(tools, choice, form, parallel=options.parallel_tool_calls):
            return None
        with _naming_fields("tools" if form is None else "response_format"):
            return answer_mask(
                self.tokenizer, thinking=thinking, tools=tools, tool_choice=choice, response_format=form,
                parallel=options.parallel_tool_calls,
            )  # fmt: skip

    def loop(self, max_waiting: int) -> Worker:
        """See `Engine.loop`; one job runs at a time."""
        return Worker(max_waiting)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """See `Engine.prompt_ids`."""
        options = options or ChatOptions()
        thinking = self.thinking if options.thinking is None else options.thinking
        images = self._images(messages)
        with _naming_fields():
            return render(
                self.tokenizer, messages, tools=options.tools, thinking=thinking, effort=options.effort,
                images=sizes(images), tool_choice=options.tool_choice, response_format=options.response_format,
                add_generation_prompt=add_generation_prompt,
            ).ids  # fmt: skip

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        service: Service | None = None,
    ) -> LocalJob:
        """See `Engine.complete`."""
        rows = [self._prompt_ids(prompt) for prompt in prompts]
        longest = max(rows, key=len)
        params = self._fit(longest, params, "prompt")
        readers = [TextReader(self.tokenizer, params.stop) for _ in range(n * len(rows))]
        return LocalJob(self, rows, params, n, readers)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
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
        room = self.context_length - len(ids)
        if room < 1:
            raise FieldError(
                f"{param} has {len(ids)} tokens, but prompt and answer together may have {self.context_length}; "
                "shorten it, or start the server with a larger --context",
                param,
                "context_length_exceeded",
            )
        return replace(params, max_tokens=min(params.max_tokens, room))


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a message's content that are tables; the renderer complains about others."""
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


@contextlib.contextmanager
def _naming_fields(field: str = "messages") -> Iterator[None]:
    """Errors of renderer and grammar begin with the path of what is wrong; clients get it as the field's name."""
    try:
        yield
    except RequestError as error:
        path = _FIELD.match(str(error))
        raise FieldError(str(error), path[0] if path else field) from None


_FIELD = re.compile(r"(?:messages|tools|tool_choice|response_format)[\w.\[\]$-]*\b\]?")


class LocalJob:
    """A job of a `LocalEngine`; see `Job`.

    Args:
        mask: of the grammar that every answer obeys.
        history: how many tokens of a chat prompt stand in front of options that hold for this one request; 0 = there are none.
        turn: of a chat, the tokens of the conversation with an answer as the client will send it back.
    """

    def __init__(
        self,
        engine: LocalEngine,
        prompts: list[list[int]],
        params: SamplingParams,
        n: int,
        readers: Sequence[Reader],
        *,
        mask: TokenMask | None = None,
        history: int = 0,
        turn: Callable[[Mapping[str, Any]], list[int]] | None = None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._n = n
        self._readers = readers
        self._mask = mask
        self._history = history
        self._turn = turn
        self._closed = False
        self._generation: Generation | None = None
        self._prefill_seconds = 0.0

    def close(self) -> None:
        """Stop before the next token."""
        self._closed = True

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self._generation.usage if self._generation else Usage()

    @property
    def timing(self) -> Timing:
        """Seconds so far, and drawn tokens a second of decoding."""
        if self._generation is None:
            return Timing(self._prefill_seconds, 0.0, 0.0)
        return Timing(self._prefill_seconds, self._generation.seconds, self._generation.tokens_per_second)

    def __iter__(self) -> Iterator[Delta]:
        began = time.perf_counter()
        prompts = [self._prompt(ids) for ids in self._prompts]
        rows = [prompt for prompt in prompts for _ in range(self._n)]
        self._generation = self._engine.generator.start(
            rows, [self._params] * len(rows), readers=self._readers, stream=[r % self._n for r in range(len(rows))],
            constraints=None if self._mask is None else [self._mask.start() for _ in rows],
            keep_states=self._turn is not None,
        )  # fmt: skip
        self._prefill_seconds = time.perf_counter() - began
        for delta in self._generation:
            if self._closed:
                break
            yield delta
        if self._turn is not None and not self._closed:
            self._keep_turns(prompts[0], self._turn)

    def _prompt(self, ids: list[int]) -> Prefix:
        """Run a prompt behind the longest kept state, and keep the state at its end.

        Options of this one request stand at the end of a prompt; the next request does not have them, and a state cannot
        be cut back. The state in front of them is therefore kept too.
        """
        engine = self._engine
        kept = engine.kept.find(ids)
        prefix = engine.generator.copy(kept) if kept else None
        if len(prefix.ids if prefix else ()) < self._history:
            prefix = engine.generator.prefill(ids[: self._history], prefix)
            engine.kept.keep(engine.generator.copy(prefix))
        run = prefix.run if prefix else 0
        prefix = engine.generator.prefill(ids, prefix)
        prefix.run += run
        engine.kept.keep(engine.generator.copy(prefix))
        return prefix

    def _keep_turns(self, prompt: Prefix, turn_of: Callable[[Mapping[str, Any]], list[int]]) -> None:
        """Keep the state after each finished answer as the next request will write it, closing tags included.

        The next request sends the answer as text. If that text's tokens are those that were drawn, the state at hand
        only has to see the closing tags; otherwise (another tokenisation of the same text, a cut at a stop string,
        options of the one request between history and answer) the answer is run once more behind the longest kept
        beginning. Either way the next turn is answered as if nothing had been kept.
        """
        engine, generator = self._engine, self._engine.generator
        assert self._generation is not None
        if engine.kept.limit == 0:
            return
        for answer in self._generation.answers:
            assert isinstance(answer.reader, ChatReader), "a chat is read by channels"
            try:
                turn = turn_of(answer.reader.message())
            except RequestError:  # a cut call whose arguments cannot be sent back
                continue
            seen = prompt.ids + answer.token_ids[:-1]
            start = None
            if answer.state is not None and turn[: len(seen)] == seen:
                start = Prefix(seen, answer.state, prompt.logits_1Z, 0)
            else:
                kept = engine.kept.find(turn)
                start = generator.copy(kept) if kept else None
            if len(turn) <= engine.context_length:
                engine.kept.keep(generator.prefill(turn, start))
