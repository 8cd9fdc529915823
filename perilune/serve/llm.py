"""Offline generation: many prompts in, all answers out, over the same engine that serves HTTP."""

from __future__ import annotations

import operator
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.errors import ConfigError
from perilune.serve.engine import JobEnd
from perilune.serve.job import LocalJob
from perilune.serve.local_engine import LocalEngine
from perilune.serve.request import (
    ChatOptions,
    Delta,
    FinishReason,
    SamplingParams,
    Service,
    Timing,
    TokenLogprob,
    Usage,
)
from perilune.serve.settings import EngineSettings

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Output:
    """One answer.

    Attributes:
        text: of the answer; of a chat message its response.
        token_ids: drawn, the end token included.
        finish_reason: "stop", "length" or "tool_calls".
        reasoning: of a chat message that was thought about.
        tool_calls: in the OpenAI form.
        logprobs: of the text's tokens, if they were asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one prompt.

    Attributes:
        prompt_ids: its tokens.
        outputs: its answers.
        usage, timing: of all of them.
        prompt_logprobs: one entry a token of the prompt, None for the first; None if they were not asked for.
    """

    prompt_ids: list[int]
    outputs: list[Output]
    usage: Usage
    timing: Timing
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.outputs[0].text


class LLM:
    """A model for programs.

        with LLM("demo") as llm:
            [result] = llm.generate(["def main("], SamplingParams(max_tokens=64))

    Args:
        model: name or folder of a run, or an engine, which is then shared and not closed here.
        device, step, context_length, settings: of a run, see `load_engine`.
        warm_up: compile and record whatever prompts can need before this returns, so that the first ones take no longer than
            the rest: worth it on a GPU, for measurements and for programs that answer somebody.

    Attributes:
        engine: answers; also usable directly, and by a server at the same time.

    Raises:
        CheckpointError, ConfigError: see `load_engine`.
    """

    def __init__(
        self,
        model: str | Path | LocalEngine,
        *,
        device: str = "auto",
        step: int | None = None,
        context_length: int = 8192,
        settings: EngineSettings | None = None,
        warm_up: bool = False,
    ) -> None:
        self._own = not isinstance(model, LocalEngine)
        if isinstance(model, LocalEngine):
            self.engine = model
        else:
            from perilune.serve.run_engine import load_engine

            self.engine = load_engine(
                model, device=device, step=step, context_length=context_length, settings=settings
            )  # fmt: skip
        if warm_up:
            self.engine.warm_up()

    def close(self) -> None:
        """End the engine, if it was made here."""
        if self._own:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
        *,
        service: Service | None = None,
    ) -> list[Result]:
        """Continue prompts; all of them run together.

        Args:
            prompts: texts or lists of token ids, or a single one.
            params: for all, or one for each.
            n: answers to each.
            service: priority and salt.

        Returns:
            One result a prompt, in their order.

        Raises:
            RequestError: a prompt that cannot be continued; nothing was run then.
            EngineFailed: the model failed.
        """
        many: Sequence[Prompt] = [prompts] if _single(prompts) else prompts  # type: ignore[assignment, list-item]
        jobs = [
            self.engine.complete([prompt], one, n, service=service)
            for prompt, one in zip(many, _each(params, len(many)), strict=True)
        ]
        return _run(jobs)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
        options: ChatOptions | None = None,
        *,
        service: Service | None = None,
    ) -> list[Result]:
        """Answer conversations, which are lists of OpenAI messages, or a single one; as `generate`."""
        single = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        many: Sequence[Conversation] = [conversations] if single else conversations  # type: ignore[assignment, list-item]
        jobs = [
            self.engine.chat(messages, one, n, options, service)
            for messages, one in zip(many, _each(params, len(many)), strict=True)
        ]
        return _run(jobs)

    def logprobs(self, texts: Prompt | Sequence[Prompt], top: int = 0) -> list[list[TokenLogprob | None]]:
        """How likely the model thinks each token of some texts; None for the first token of each.

        Args:
            texts: as the prompts of `generate`; at least one token shorter than the context.
            top: so many of the most likely tokens at each place.
        """
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=top)
        return [result.prompt_logprobs or [] for result in self.generate(texts, params)]


def _single(prompts: Any) -> bool:
    """Whether this is one prompt: a text or token ids, whatever kind of integers; or nothing that could be several."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        return True
    try:
        operator.index(prompts[0])
    except (TypeError, LookupError):
        return False
    return True


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    """Parameters for each prompt; those of one request for all, whose seed is then that of each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ConfigError(
            f"params is {repr(params)[:80]}; give SamplingParams for all prompts, or a list of them, one for each"
        )
    if len(params) != count:
        raise ConfigError(f"{len(params)} SamplingParams for {count} prompts; give one for all, or one for each")
    return params


def _run(jobs: Sequence[LocalJob]) -> list[Result]:
    """Run jobs together to their end. The first that fails stops all."""
    ended: queue.SimpleQueue[JobEnd] = queue.SimpleQueue()
    outputs = [[Output() for _ in job.answers] for job in jobs]

    def listener(index: int):
        def hear(event: Delta | JobEnd) -> None:
            if isinstance(event, JobEnd):
                ended.put(event)
            else:
                _add(outputs[index][event.row], event)

        return hear

    try:
        for index, job in enumerate(jobs):
            job.start(listener(index))
        for _ in jobs:
            if (error := ended.get().error) is not None:
                raise error
    finally:
        for job in jobs:
            job.close()
    results = []
    for job, answers in zip(jobs, outputs):
        for answer, output in zip(job.answers, answers):
            output.token_ids = answer.token_ids
        scores = job.prompt_logprobs
        results.append(
            Result(job.prompts[0].ids[: job.prompts[0].prompt], answers, job.usage, job.timing, scores and scores[0])
        )
    return results


def _add(output: Output, delta: Delta) -> None:
    output.text += delta.text
    output.reasoning += delta.reasoning
    output.finish_reason = delta.finish_reason
    output.logprobs += delta.logprobs
    for call in delta.calls:
        if call.id is not None:
            function = {"name": call.name, "arguments": ""}
            output.tool_calls.append({"id": call.id, "type": "function", "function": function})
        output.tool_calls[call.position]["function"]["arguments"] += call.arguments
