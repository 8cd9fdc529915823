"""What a request says becomes tokens, images and a grammar, or is refused before anything is computed."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune.data.image import ProcessedImage
from perilune.errors import RequestError
from perilune.serve import structured
from perilune.serve.images import ShownImages, sizes
from perilune.serve.request import ChatOptions, FieldError, SamplingParams
from perilune.tokenizer import Tokenizer
from perilune.tokenizer.xtml import render
from perilune.tokenizer.xtml.grammar import answer_mask, needs_grammar
from perilune.tokenizer.xtml.grammar_mask import TokenMask
from perilune.tokenizer.xtml.render import Rendered


class Prompts:
    """Reads the requests to one model; its arguments are those of `LocalEngine`. All methods raise FieldError for what the
    model cannot do, or nobody could."""

    def __init__(
        self, tokenizer: Tokenizer, name: str, thinking: bool, images: ShownImages | None, context_length: int
    ) -> None:
        self._tokenizer, self._name, self._thinking = tokenizer, name, thinking
        self._images, self._context_length = images, context_length

    def thinks(self, options: ChatOptions) -> bool:
        """Whether the answer begins with thoughts."""
        thinking = self._thinking if options.thinking is None else options.thinking
        if (thinking or options.effort is not None) and not self._thinking:
            raise FieldError(
                "this model was not taught to think; leave reasoning_effort and thinking out", "reasoning_effort"
            )
        return thinking

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, add_generation_prompt: bool = True
    ) -> tuple[Rendered, list[ProcessedImage]]:
        """The tokens of a conversation, and the images in it."""
        if isinstance(messages, str | Mapping) or not all(isinstance(one, Mapping) for one in messages):
            raise FieldError(
                f'messages is {repr(messages)[:80]}; give a list of messages, such as {{"role": "user", "content": "Hi"}}',
                "messages",
            )
        images = self._loaded(messages)
        with _naming_fields():
            rendered = render(
                self._tokenizer, messages, tools=options.tools, thinking=self.thinks(options), effort=options.effort,
                images=sizes(images), tool_choice=options.tool_choice, response_format=options.response_format,
                add_generation_prompt=add_generation_prompt,
            )  # fmt: skip
        return rendered, images

    def _loaded(self, messages: Sequence[Mapping[str, Any]]) -> list[ProcessedImage]:
        """The images of a conversation, decoded.

        Raises:
            FieldError: one cannot be read, or the model takes no images.
        """
        if self._images is None:
            parts = [
                part for message in messages for part in _parts(message) if str(part.get("type")).startswith("image")
            ]
            if parts:
                raise FieldError(
                    f"{self._name} has no vision tower and takes no images; send text, or use a run of `perilune demo --vision`",
                    "messages",
                )
            return []
        with _naming_fields():
            return self._images.load(messages)

    def mask(
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
                self._tokenizer, thinking=thinking, tools=tools, tool_choice=choice, response_format=form,
                parallel=options.parallel_tool_calls, **more,
            )  # fmt: skip

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a text, or these tokens."""
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        else:
            try:
                ids = [int(operator.index(token_id)) for token_id in prompt]
            except TypeError:
                raise FieldError(
                    f"prompt is {repr(prompt)[:80]}; give a text or a list of token ids, which are whole numbers",
                    "prompt",
                ) from None
            for token_id in ids:
                if not 0 <= token_id < self._tokenizer.vocab_size:
                    raise FieldError(
                        f"prompt has the token id {token_id}; this model's ids are 0..{self._tokenizer.vocab_size - 1}",
                        "prompt",
                    )
        if not ids:  # no context predicts how a document begins, so nothing was learned about it
            raise FieldError("the prompt is empty; give at least the first word of the text", "prompt")
        return ids

    def fit(self, ids: Sequence[int], params: SamplingParams, param: str) -> SamplingParams:
        """The parameters with no more tokens than there is room for behind the longest prompt, which the request's field
        `param` holds."""
        params.check_vocabulary(self._tokenizer.vocab_size)
        room = self._context_length - len(ids)
        if room < 1:
            raise FieldError(
                f"{param} has {len(ids)} tokens, but prompt and answer together may have {self._context_length}; "
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


@contextlib.contextmanager
def _naming_fields(field: str = "messages") -> Iterator[None]:
    """Errors of renderer and grammar begin with the path of what is wrong; clients get it as the field's name."""
    try:
        yield
    except RequestError as error:
        path = _FIELD.match(str(error))
        raise FieldError(str(error), path[0] if path else field) from None


_FIELD = re.compile(r"(?:messages|tools|tool_choice|response_format)[\w.\[\]$-]*\b\]?")
