"""Tokens as clients see them: text, bytes, and log-probabilities in the two forms of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perilune.serve.request import TokenLogprob
from perilune.tokenizer import StreamDecoder, Tokenizer

_LEAST = -9999.0
"""JSON has no infinity: what is impossible reads like this, as elsewhere."""


class Words:
    """How one tokenizer's tokens are shown.

    Args:
        tokenizer: of the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """A token as text; bytes that are no characters are written `\\xNN`."""
        return self.tokenizer.piece(token_id)

    def _bytes(self, token_id: int) -> list[int]:
        special = self.tokenizer.special
        return list(special.name(token_id).encode() if token_id in special else self.tokenizer.token_bytes(token_id))

    def chat(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        return {
            "content": [
                self._entry(one.token_id, one.logprob)
                | {"top_logprobs": [self._entry(token_id, value) for token_id, value in one.top]}
                for one in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": max(logprob, _LEAST), "bytes": self._bytes(token_id)}

    def completion(self, tokens: Sequence[TokenLogprob], *, shift: int = 0) -> dict[str, Any]:
        """`logprobs` of a completion choice.

        Args:
            tokens: in order.
            shift: characters of the text in front of their own offsets.
        """
        return {
            "tokens": [self.text(one.token_id) for one in tokens],
            "token_logprobs": [max(one.logprob, _LEAST) for one in tokens],
            "top_logprobs": [self._alternatives(one) for one in tokens],
            "text_offset": [shift + one.offset for one in tokens],
        }

    def _alternatives(self, one: TokenLogprob) -> dict[str, float] | None:
        """The most likely tokens, and the drawn one if it is not among them."""
        if not one.top:
            return None
        pairs = dict(one.top) | {one.token_id: one.logprob}
        return {self.text(token_id): max(value, _LEAST) for token_id, value in pairs.items()}

    def echo(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None) -> dict[str, Any] | None:
        """`logprobs` of a prompt; its first token has none, for nothing stands before it."""
        if logprobs is None:
            return None
        offsets, length, decoder = [], 0, StreamDecoder(self.tokenizer)
        for token_id in ids:
            offsets.append(length)
            length += len(decoder.push(token_id))
        return {
            "tokens": [self.text(token_id) for token_id in ids],
            "token_logprobs": [None if one is None else max(one.logprob, _LEAST) for one in logprobs],
            "top_logprobs": [None if one is None else self._alternatives(one) for one in logprobs],
            "text_offset": offsets,
        }

    def prompt(self, logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: for each token, id -> logprob and text, for itself and the likely others."""
        return [
            None
            if one is None
            else {
                str(token_id): {"logprob": max(value, _LEAST), "decoded_token": self.text(token_id)}
                for token_id, value in ({one.token_id: one.logprob} | dict(one.top)).items()
            }
            for one in logprobs
        ]


def joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Completion log-probabilities of two texts, one behind the other."""
    if first is None or second is None:
        return first or second
    return {key: first[key] + second[key] for key in first}
