"""Which token may come next: a grammar over the ids of a tokenizer, run by llguidance (extra: grammar)."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from perilune.errors import RequestError
from perilune.tokenizer.interface import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Constraint(Protocol):
    """What one answer may still say. The state is its own; it only goes forward."""

    def mask(self) -> NDArray[np.bool_]:
        """[vocabulary] bool: the ids that may come next; at least one until `is_end`."""
        ...

    def advance(self, token_id: int) -> None:
        """Take an id that the mask allows."""
        ...

    @property
    def is_end(self) -> bool:
        """Whether the answer is complete: nothing may follow."""
        ...


class TokenMask:
    """A grammar made ready for one tokenizer; every answer gets its own `start()`.

    Args:
        tokenizer: decides bytes and control ids; `<|end_of_msg|>` ends an answer that the grammar accepts.
        lark: the grammar, see `perilune.tokenizer.xtml.grammar`.

    Raises:
        RequestError: llguidance is not installed, or the grammar asks for something that it cannot enforce.
    """

    def __init__(self, tokenizer: Tokenizer, lark: str) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._end_id = tokenizer.special.end_of_msg
        self._matcher = llguidance().LLMatcher(_ll_tokenizer(tokenizer), lark, log_level=0)
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise RequestError(
                f"the answer cannot be constrained: {reason[:300]}; simplify the schema, or set strict to false for the tool"
            )

    def start(self) -> Constraint:
        """The state before the first token of an answer."""
        return _Matcher(self._matcher.deep_copy(), self._vocab_size, self._end_id)


class _Matcher:
    """A `Constraint` over llguidance's matcher."""

    def __init__(self, matcher: Any, vocab_size: int, end_id: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._ended = False

    def mask(self) -> NDArray[np.bool_]:
        """See `Constraint.mask`."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def advance(self, token_id: int) -> None:
        """See `Constraint.advance`."""
        assert not self._ended, "nothing may follow the end"
        # A matcher that can go no further has stopped already, and takes the end token no more.
        if token_id == self._end_id and self._matcher.is_accepting():
            self._ended = True
            return
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_end(self) -> bool:
        """See `Constraint.is_end`."""
        return self._ended

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0][:300]
            if reason.startswith("NoExtension"):  # the library's name for it
                reason = "no token may come next"
            raise RequestError(
                f"the answer cannot be constrained any further: {reason}; the schema, regex or grammar allows no answer "
                "that goes on from here, or costs too much to follow: simplify it"
            )


def llguidance() -> ModuleType:
    """The library. RequestError if it is not installed."""
    try:
        import llguidance as library
    except ImportError:
        raise RequestError(
            "tool_choice, strict tools and response_format need llguidance, which is not installed here: "
            "pip install perilune[grammar]"
        ) from None
    return library


class _Words:
    """A tokenizer as llguidance reads it: bytes of every id, and a way to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special
        self.eos_token_id = special.end_of_msg
        self.bos_token_id = special.bos
        self.special_token_ids = list(special.ids.values())
        self.tokens = [
            special.name(i).encode() if i in special else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode_bytes(text if isinstance(text, bytes) else text.encode())


@functools.lru_cache(maxsize=4)
def _ll_tokenizer(tokenizer: Tokenizer) -> Any:
    """llguidance's tables, which take a while to make for a large vocabulary."""
    library = llguidance()
    return library.LLTokenizer(library.TokenizerWrapper(_Words(tokenizer)), n_vocab=tokenizer.vocab_size)
