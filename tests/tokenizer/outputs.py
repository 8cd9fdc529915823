"""Outputs of an assistant for tests: written by hand, drawn at random, taken from a grammar, and bent out of shape."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from message_lists import texts

from perilune.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from perilune.tokenizer.xtml import Marker, Segment, close_tag, encode_segments, open_tag

BYTES = ByteTokenizer()
OPEN, CLOSE, SEP, END = (Marker(name) for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))


@functools.cache
def bpe() -> Tokenizer:
    """A BPE that has merges across the words of tags."""
    text = (
        'think response tools call tool="get_weather" index="1" argument key="city" type="string" hello {"a": 1} é月 '
    )
    return train_bpe([text * 20], 288 + 96)


def ids(*parts: Segment | Sequence[Segment], tokenizer: Tokenizer = BYTES) -> list[int]:
    """Ids of text, markers and tags."""
    flat: list[Segment] = []
    for part in parts:
        flat += [part] if isinstance(part, (str, Marker)) else part
    return encode_segments(tokenizer, flat)


def argument(key: str, kind: str, value: str) -> list[Segment]:
    return [*open_tag("argument", {"key": key, "type": kind}), value, *close_tag("argument")]


def call(tool: str, index: int, *arguments: Sequence[Segment]) -> list[Segment]:
    inner = [segment for one in arguments for segment in one]
    return [*open_tag("call", {"tool": tool, "index": str(index)}), *inner, *close_tag("call")]


def tools(*calls: Sequence[Segment]) -> list[Segment]:
    return [*open_tag("tools"), *(segment for one in calls for segment in one), *close_tag("tools")]


def answer(text: str, *behind: Sequence[Segment]) -> list[Segment]:
    """Body of an opened response, and the end of the message."""
    inner = [segment for one in behind for segment in one]
    return [text, *close_tag("response"), *inner, *close_tag("message"), END]


def split_bytes(output: Sequence[int], tokenizer: Tokenizer = BYTES) -> list[int]:
    """The same bytes, every one as its own id."""
    out: list[int] = []
    for token_id in output:
        if token_id in tokenizer.special:
            out.append(token_id)
        else:
            out += [tokenizer.byte_id(byte) for byte in tokenizer.token_bytes(token_id)]
    return out


def draw(constraint, seed: int, *, longest: int = 3000, ending: float = 0.3) -> list[int]:
    """An output that a grammar allows, drawn uniformly, control ids preferred so that it ends; cut at `longest`."""
    rng, out = random.Random(seed), []
    while not constraint.is_end and len(out) < longest:
        allowed = np.flatnonzero(constraint.mask()).tolist()
        controls = [token_id for token_id in allowed if token_id in BYTES.special]
        out.append(rng.choice(controls if controls and rng.random() < ending else allowed))
        constraint.advance(out[-1])
    return out


_PIECES = [
    [OPEN], [CLOSE], [SEP], [END], [Marker("[EOS]")], [Marker("[PAD]")], [Marker("<|media_pad|>")],
    open_tag("think"), close_tag("think"), open_tag("response"), close_tag("response"), open_tag("tools"),
    close_tag("tools"), open_tag("message", {"role": "user"}), close_tag("message"), open_tag("json", {"type": "object"}),
    close_tag("json"), open_tag("call", {"tool": "f", "index": "1"}), open_tag("call", {"index": "2"}), close_tag("call"),
    open_tag("argument", {"key": "a", "type": "string"}), open_tag("argument", {"key": "b", "type": "number"}),
    open_tag("argument", {"key": "c", "type": "object"}), close_tag("argument"), [OPEN, " think\n", SEP], ["think"],
    ["call tool="], ["1"], ["{}"], ["null"], ["é"], ["🌖"],
]  # fmt: skip

_streams = st.lists(
    st.sampled_from(_PIECES).map(ids)
    | texts.map(lambda text: ids(text))
    | st.binary(max_size=3).map(list)
    | st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=3),
    max_size=14,
).map(lambda parts: [token_id for part in parts for token_id in part])

_values = st.one_of(
    st.tuples(st.just("string"), texts),
    st.tuples(st.just("number"), st.sampled_from(["0", "-1.5", "1e400", "x", "", "true", '"1"'])),
    st.tuples(st.just("object"), st.sampled_from(["{}", '{"a": [1, null]}', "{", "[]", '{"a": "\\ud800"}', "NaN"])),
    st.tuples(
        st.sampled_from(["array", "boolean", "null", "integer"]), st.sampled_from(["[]", "true", "null", "3", "[NaN]"])
    ),
)
_calls = st.lists(
    st.tuples(st.sampled_from(["f", "q\"&", "undeclared"]), st.lists(st.tuples(st.sampled_from(["a", "k\"", ""]), _values), max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip


@st.composite
def _valid(draw) -> list[int]:
    """Mostly an output that follows the grammar from an opened think."""
    behind = []
    if draw(st.booleans()):
        drawn = draw(_calls)
        behind = [tools(*(call(n, i, *(argument(k, *v) for k, v in a)) for i, (n, a) in enumerate(drawn, 1)))]
    return ids(draw(texts), close_tag("think"), open_tag("response"), answer(draw(texts), *behind))


@st.composite
def _mutated(draw) -> list[int]:
    """A valid output with pieces cut, doubled, moved or put in."""
    out = draw(_valid())
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(out)))
        stop = draw(st.integers(start, min(len(out), start + 12)))
        piece = draw(st.sampled_from([[], out[start:stop] * 2, out[:6]]) | st.sampled_from(_PIECES).map(ids))
        out = out[:start] + piece + out[stop:]
    return out


outputs = _streams | _valid() | _mutated()
"""Streams of ids, from random to valid."""
