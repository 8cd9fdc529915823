"""A conversation in this process: what was said so far, and the answer that is being drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perilune.serve.engine import Engine, Job
from perilune.serve.messages import user_message
from perilune.serve.request import Delta, FinishReason, SamplingParams, Timing, Usage


class ChatSession:
    """Messages of one conversation over an engine; the engine keeps the states, so a turn runs only what is new.

    Args:
        engine: answers.
        params: of every answer.
        system: a system message that stands before the conversation; empty = none.

    Attributes:
        messages: the conversation, ready to be sent again.
        usage, timing, finish_reason: of the last answer.
    """

    def __init__(self, engine: Engine, params: SamplingParams, *, system: str = "") -> None:
        self.engine = engine
        self.params = params
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.usage = Usage()
        self.timing = Timing()
        self.finish_reason: FinishReason | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def send(self, text: str, images: Sequence[Path] = ()) -> Iterator[Delta]:
        """Say something; yields the answer's text as it becomes certain.

        Closing the iterator stops the answer; what was said up to then stays in the conversation.

        Args:
            text: the message.
            images: files that are shown before it.

        Raises:
            RequestError: the conversation leaves no room for an answer, or an image cannot be read; the conversation is
                then as it was before.
        """
        question = user_message(text, images)
        job = self.engine.chat([*self.messages, question], self.params)
        return self._answer(job, question)

    def _answer(self, job: Job, question: dict[str, Any]) -> Iterator[Delta]:
        answer, reasoning = "", ""
        self.finish_reason = None
        try:
            for delta in job:
                answer += delta.text
                reasoning += delta.reasoning
                self.finish_reason = delta.finish_reason
                yield delta
        finally:
            job.close()
            self.usage, self.timing = job.usage, job.timing
            if answer or reasoning or self.finish_reason:
                message = {"role": "assistant", "content": answer} | ({"reasoning": reasoning} if reasoning else {})
                self.messages += [question, message]
