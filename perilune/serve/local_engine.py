"""One model in this process: requests become jobs, and a job's text is pulled token by token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune.serve.generator import Generation, Generator, Prefix
from perilune.serve.kept_states import KeptStates
from perilune.serve.reader import ChatReader, Reader, TextReader
from perilune.serve.request import Delta, FieldError, SamplingParams, Timing, Usage
from perilune.tokenizer.chat import render_chat


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

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, n: int = 1) -> LocalJob:
        """See `Engine.chat`."""
        ids = render_chat(self.tokenizer, messages, thinking=self.thinking)
        params = self._fit(ids, params, "messages")
        readers = [ChatReader(self.tokenizer, params.stop, thinking=self.thinking) for _ in range(n)]
        return LocalJob(self, [ids], params, n, readers, messages)

    def complete(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams, n: int = 1) -> LocalJob:
        """See `Engine.complete`."""
        rows = [self._prompt_ids(prompt) for prompt in prompts]
        longest = max(rows, key=len)
        params = self._fit(longest, params, "prompt")
        readers = [TextReader(self.tokenizer, params.stop) for _ in range(n * len(rows))]
        return LocalJob(self, rows, params, n, readers, None)

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


class LocalJob:
    """A job of a `LocalEngine`; see `Job`."""

    def __init__(
        self,
        engine: LocalEngine,
        prompts: list[list[int]],
        params: SamplingParams,
        n: int,
        readers: Sequence[Reader],
        messages: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._n = n
        self._readers = readers
        self._messages = messages
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
        generator = self._engine.generator
        chat = self._messages is not None
        self._generation = generator.start(
            rows, [self._params] * len(rows), readers=self._readers, stream=[r % self._n for r in range(len(rows))],
            keep_states=chat,
        )  # fmt: skip
        self._prefill_seconds = time.perf_counter() - began
        for delta in self._generation:
            if self._closed:
                break
            yield delta
        if chat and not self._closed:
            self._keep_turns(prompts[0])

    def _prompt(self, ids: list[int]) -> Prefix:
        """Run a prompt behind the longest kept state, and keep the state at its end."""
        engine = self._engine
        kept = engine.kept.find(ids)
        prefix = engine.generator.prefill(ids, engine.generator.copy(kept) if kept else None)
        engine.kept.keep(engine.generator.copy(prefix))
        return prefix

    def _keep_turns(self, prompt: Prefix) -> None:
        """Keep the state after each finished answer as the next request will write it, closing tags included.

        The next request sends the answer as text. If that text's tokens are those that were drawn, the state at hand
        only has to see the closing tags; otherwise (another tokenisation of the same text, a cut at a stop string) the
        answer is run once more behind the prompt. Either way the next turn is answered as if nothing had been kept.
        """
        engine, generator = self._engine, self._engine.generator
        assert self._generation is not None and self._messages is not None
        if engine.kept.limit == 0:
            return
        for answer in self._generation.answers:
            message = {"role": "assistant", "content": answer.reader.text, "reasoning": answer.reader.reasoning}
            turn = render_chat(
                engine.tokenizer, [*self._messages, message], thinking=engine.thinking, add_generation_prompt=False
            )
            seen = prompt.ids + answer.token_ids[:-1]
            start = None
            if answer.state is not None and turn[: len(seen)] == seen:
                start = Prefix(seen, answer.state, prompt.logits_1Z, 0)
            else:
                kept = engine.kept.find(prompt.ids)
                start = generator.copy(kept) if kept else None
            if len(turn) <= engine.context_length:
                engine.kept.keep(generator.prefill(turn, start))
