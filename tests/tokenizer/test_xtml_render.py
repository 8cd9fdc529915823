"""Prompts of the chat format, against the id vectors of the published renderer and hand-made prompts."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_lists import count_images, message_lists
from rank_files import k3_rank_file, small_rank_file

from perilune.errors import RequestError
from perilune.tokenizer import ByteTokenizer, TiktokenTokenizer, train_bpe
from perilune.tokenizer.xtml import conversation_segments, encode_segments, expand, render

BYTE = ByteTokenizer()
BPE = train_bpe(['message role="user" <|open|>think<|sep|> the moon\n\n' * 50], 400)
RANKS = TiktokenTokenizer(small_rank_file("message", " role", "user", "<|open|>", "hello", '="', "the moon"))
TOKENIZERS = [BYTE, BPE, RANKS]
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "b": 1, "a": "é"}}}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "first", "arguments": "{}"}},
    {"id": "c2", "type": "function", "function": {"name": "second", "arguments": "{}"}},
]


def text_of(messages, **options):
    """The prompt as text with control tokens by name, in a short form: <tag …>, </tag>, and | at the end of a message."""
    text = BYTE.decode(render(BYTE, messages, **options).ids, skip_special=False)
    text = text.replace("<|end_of_msg|>", "|").replace("<|open|>", "<").replace("<|close|>", "</")
    return text.replace("<|sep|>", ">")


def body_of(message, **options):
    """Prompt of one message alone."""
    return text_of([message], add_generation_prompt=False, **options)


@pytest.fixture(scope="module")
def published():
    return TiktokenTokenizer(k3_rank_file())


GOLDEN = [163587, 2778, 6244, 878, 2482, 1, 163589, 18699, 163588, 2778, 163589, 163586,
          163587, 2778, 6244, 878, 69702, 1, 163589, 163587, 39964, 163589]  # fmt: skip


def test_ids_of_the_published_renderer(published):
    assert render(published, HI).ids == GOLDEN
    assert render(published, HI, thinking=False).ids == [*GOLDEN[:-2], 12092, 163589]
    assert render(published, HI, add_generation_prompt=False).ids == GOLDEN[:12]


def test_ids_of_an_assistant_turn_with_a_call(published):
    """By hand from the table of published ids."""
    call = {"function": {"name": "user", "arguments": '{"system": "Hi"}'}}
    message = {"role": "assistant", "content": "Hi", "tool_calls": [call]}
    o, c, s, end = 163587, 163588, 163589, 163586
    ids = render(published, [message], add_generation_prompt=False).ids
    head = [
        o,
        2778,
        6244,
        878,
        69702,
        1,
        s,
        o,
        39964,
        s,
        c,
        39964,
        s,
        o,
        12092,
        s,
        18699,
        c,
        12092,
        s,
        o,
        25385,
        s,
        o,
        10257,
    ]
    tail = [s, 18699, c, 47185, s, c, 10257, s, c, 25385, s, c, 2778, s, end]
    assert ids[: len(head)] == head and ids[-len(tail) :] == tail
    assert [i for i in ids if i >= 163584] == [
        o,
        s,
        o,
        s,
        c,
        s,
        o,
        s,
        c,
        s,
        o,
        s,
        o,
        s,
        o,
        s,
        c,
        s,
        c,
        s,
        c,
        s,
        c,
        s,
        end,
    ]


def test_pieces_are_those_of_the_published_renderer():
    names = [
        getattr(piece, "name", piece)
        for piece in conversation_segments([{"role": "user", "name": "a", "content": "x"}])
    ]
    assert names[:14] == [
        "<|open|>", "message", " role", '="', "user", '"', " name", '="', "a", '"', "<|sep|>", "x", "<|close|>", "message"
    ]  # fmt: skip


def test_every_text_part_is_encoded_on_its_own():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": ""}, {"type": "text", "text": "lo"}]
    segments = conversation_segments([{"role": "user", "content": parts}])
    assert "hel" in segments and "lo" in segments and "" not in segments


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "system", "content": "s"}, '<message role="system">s</message>|'),
        ({"role": "user", "content": "", "name": "Al"}, '<message role="user" name="Al"></message>|'),
        ({"role": "user", "content": [], "name": ""}, '<message role="user"></message>|'),
        ({"role": "user", "name": 'a"&', "content": 'b"&'}, '<message role="user" name="a&quot;&amp;">b"&</message>|'),
        (
            {"role": "assistant", "content": "b", "reasoning_content": "r"},
            '<message role="assistant"><think>r</think><response>b</response></message>|',
        ),
        (
            {"role": "assistant", "content": "b", "reasoning_content": "", "reasoning": "r", "name": "bot"},
            '<message role="assistant" name="bot"><think>r</think><response>b</response></message>|',
        ),
        ({"role": "assistant"}, '<message role="assistant"><think></think><response></response></message>|'),
        (
            {"role": "assistant", "content": None, "reasoning": " \n "},
            '<message role="assistant"><think></think><response></response></message>|',
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "b"}], "tool_calls": []},
            '<message role="assistant"><think></think><response>b</response></message>|',
        ),
        ({"role": "tool", "tool": "f", "content": "r"}, '<message role="tool" tool="f" index="1">r</message>|'),
        ({"role": "tool", "name": "f", "content": "r"}, '<message role="tool" tool="f" index="1">r</message>|'),
    ],
)
def test_messages(message, expected):
    assert body_of(message) == expected


def test_without_thinking_the_think_channel_is_dropped_from_history():
    message = {"role": "assistant", "content": "b", "reasoning_content": "r"}
    assert body_of(message, thinking=False) == '<message role="assistant"><response>b</response></message>|'


def tools_of(arguments):
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 'f"', "arguments": arguments}}]}
    text = body_of(message, thinking=False)
    return text.partition("<tools>")[2].rpartition("</tools>")[0]


@pytest.mark.parametrize("wrap", [str, json.loads], ids=["text", "object"])
def test_arguments_are_typed(wrap):
    arguments = '{"s": "é \\"&<", "n": 5, "f": 1.50, "b": true, "z": null, "o": {"k": "ü", "a": 1}, "l": [1, "two"], "k\\"&": ""}'
    assert tools_of(wrap(arguments)) == (
        '<call tool="f&quot;" index="1">'
        '<argument key="s" type="string">é "&<</argument><argument key="n" type="number">5</argument>'
        '<argument key="f" type="number">1.5</argument><argument key="b" type="boolean">true</argument>'
        '<argument key="z" type="null">null</argument><argument key="o" type="object">{"k": "ü", "a": 1}</argument>'
        '<argument key="l" type="array">[1, "two"]</argument><argument key="k&quot;&amp;" type="string"></argument></call>'
    )


@pytest.mark.parametrize("arguments", [None, "", " \n", "{}", {}])
def test_no_arguments(arguments):
    assert tools_of(arguments) == '<call tool="f&quot;" index="1"></call>'


def test_arguments_that_are_no_json_stay_as_they_are():
    assert tools_of('{"a": 1') == '<call tool="f&quot;" index="1"><json type="object">{"a": 1</json></call>'


def results(*contents_and_ids, **fields):
    calls = copy.deepcopy(CALLS)
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": content} | extra for content, extra in contents_and_ids]
    text = text_of(messages, thinking=False, add_generation_prompt=False)
    return text.partition("|")[2]


FIRST = '<message role="tool" tool="first" index="1">{}</message>|'
SECOND = '<message role="tool" tool="second" index="2">{}</message>|'


@pytest.mark.parametrize(
    ("given_results", "expected"),
    [
        ([("1", {"tool_call_id": "c1"}), ("2", {"tool_call_id": "c2"})], FIRST.format(1) + SECOND.format(2)),
        # another order, and a stale name: the call decides
        (
            [("2", {"tool_call_id": "c2", "name": "old"}), ("1", {"tool_call_id": "c1"})],
            FIRST.format(1) + SECOND.format(2),
        ),
        # the alias, name and position from 0
        ([("2", {"tool_call_id": "second:1"}), ("1", {"tool_call_id": "first:0"})], FIRST.format(1) + SECOND.format(2)),
        # one that cannot be resolved: the order stays, names by position
        ([("2", {"tool_call_id": "c2"}), ("1", {"tool_call_id": "zzz"})], FIRST.format(2) + SECOND.format(1)),
        ([("2", {"tool_call_id": "second:0"}), ("1", {"tool_call_id": "c1"})], FIRST.format(2) + SECOND.format(1)),
        ([("2", {}), ("1", {})], FIRST.format(2) + SECOND.format(1)),
        # `index` counts results, also where the first call has none
        ([("2", {"tool_call_id": "c2"})], SECOND.format(2).replace('index="2"', 'index="1"')),
        # two answers to one call keep their order
        (
            [("b", {"tool_call_id": "c2"}), ("a", {"tool_call_id": "c1"}), ("c", {"tool_call_id": "c1"})],
            FIRST.format("a")
            + SECOND.format("c").replace("second", "first")
            + SECOND.format("b").replace('"2"', '"3"'),
        ),
    ],
)
def test_tool_results_stand_in_call_order(given_results, expected):
    assert results(*given_results) == expected


def test_a_repeated_call_id_means_its_first_call():
    calls = [dict(call, id="dup") for call in CALLS]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "dup", "content": "r"}]
    assert '<message role="tool" tool="first" index="1">r' in text_of(messages)


def test_results_behind_a_user_message_count_on():
    messages = [
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "user", "content": "wait"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]
    assert '<message role="tool" tool="second" index="2">2' in text_of(messages)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte", "bpe", "ranks"])
@given(data=st.data())
def test_t30_a_longer_history_extends_the_shorter_prompt(tokenizer, data):
    """Ids, not text; and the prompt that a turn was generated from is the beginning of the prompt with that turn (T29)."""
    messages = data.draw(message_lists(images=True, invalid_json=True))
    thinking = data.draw(st.booleans())
    sizes = [(640, 480, 2)] * count_images(messages)

    def ids(count, **options):
        part = messages[:count]
        return render(
            tokenizer, part, thinking=thinking, effort="low", images=sizes[: count_images(part)], **options
        ).ids

    whole = ids(len(messages), add_generation_prompt=False)
    for count in range(1, len(messages)):
        if messages[count]["role"] == "tool":
            continue  # a run of results is sorted as a whole
        assert whole[: len(ids(count, add_generation_prompt=False))] == ids(count, add_generation_prompt=False)
        if messages[count]["role"] == "assistant":
            asked = ids(count)
            assert whole[: len(asked)] == asked


@given(messages=message_lists(images=True, invalid_json=True), thinking=st.booleans())
def test_boundaries_and_mask_fit_the_ids(messages, thinking):
    """Oracle for the mask: what an assistant wrote is what its message adds to the prompt that asked for it."""
    sizes = [(3, 4, 5)] * count_images(messages)
    whole = render(BYTE, messages, thinking=thinking, images=sizes, add_generation_prompt=False)
    assert len(whole.loss_mask) == len(whole.ids) and len(whole.message_ends) == len(messages)
    assert whole.message_ends == sorted(set(whole.message_ends)) and whole.message_ends[-1] == len(whole.ids)
    assert all(whole.ids[end - 1] == BYTE.special.end_of_msg for end in whole.message_ends)
    masked = [False] * len(whole.ids)
    for count, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = whole.message_ends[count - 1] if count else 0
        opening = encode_segments(BYTE, conversation_segments(HI, thinking=thinking))
        opening = opening[render(BYTE, HI, add_generation_prompt=False).message_ends[0] :]
        assert whole.ids[before : before + len(opening)] == opening
        masked[before + len(opening) : whole.message_ends[count]] = [True] * (
            whole.message_ends[count] - before - len(opening)
        )
    special, start = BYTE.special, None
    for i in range(len(whole.ids)):  # blot the json blocks out again, tag by tag
        if whole.ids[i] in (special.open, special.close) and bytes(whole.ids[i + 1 : i + 5]) == b"json":
            if whole.ids[i] == special.open:
                start = i
            else:
                end = whole.ids.index(special.sep, i) + 1
                masked[start:end] = [False] * (end - start)
    assert whole.loss_mask == masked


def test_nothing_that_the_assistant_did_not_write_is_in_the_loss():
    messages = [
        {"role": "system", "content": "S"},
        {
            "role": "assistant",
            "reasoning": "R",
            "content": "C",
            "tool_calls": [{"function": {"name": "f", "arguments": "{J"}}],
        },
        {"role": "tool", "content": "T"},
    ]
    prompt = render(BYTE, messages, tools=[WEATHER], effort="max")
    learned = BYTE.decode([i for i, keep in zip(prompt.ids, prompt.loss_mask) if keep], skip_special=False)
    assert learned == (
        'R<|close|>think<|sep|><|open|>response<|sep|>C<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" '
        'index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>'
    )


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def test_an_image_becomes_its_size_and_pads():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "\nb"}]}]
    prompt = render(BYTE, messages, images=[(640, 48, 3)], add_generation_prompt=False)
    text = BYTE.decode(prompt.ids, skip_special=False)
    assert text == (
        '<|open|>message role="user"<|sep|>a<|media_begin|>image 640x48<|media_content|>' + "<|media_pad|>" * 3
        + "<|media_end|>\nb<|close|>message<|sep|><|end_of_msg|>"
    )  # fmt: skip
    (span,) = prompt.media
    pad = BYTE.special.ids["<|media_pad|>"]
    assert [i for i, token_id in enumerate(prompt.ids) if token_id == pad] == list(range(span.start, span.start + 3))
    segments = expand(conversation_segments(messages, add_generation_prompt=False), [(640, 48, 3)])
    assert encode_segments(BYTE, segments) == prompt.ids


def test_images_keep_their_index_when_results_change_places():
    image = {"type": "image", "image": object()}
    messages = [
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c2", "content": [image]},
        {"role": "tool", "tool_call_id": "c1", "content": [image, image]},
    ]
    prompt = render(BYTE, messages, images=[(1, 1, 1), (2, 2, 2), (3, 3, 3)])
    assert [(span.place.index, span.tokens) for span in prompt.media] == [(1, 2), (2, 3), (0, 1)]


def test_a_video_is_chunks_with_times():
    messages = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "file:x"}}]}]
    prompt = render(BYTE, messages, videos=[(64, 48, [(0, 2), (59.9996, 1), (90061.25, 1)])])
    text = BYTE.decode(prompt.ids, skip_special=False)
    element = "<|media_begin|>video 64x48<|media_content|>{}<|media_end|>"
    pad = "<|media_pad|>"
    assert (
        "".join(
            time + element.format(pads)
            for time, pads in (("00:00:00.000", 2 * pad), ("00:00:59.999", pad), ("25:01:01.250", pad))
        )
        in text
    )
    assert [(span.chunk, span.tokens) for span in prompt.media] == [(0, 2), (1, 1), (2, 1)]
    assert all(prompt.ids[span.start] == BYTE.special.ids[pad] for span in prompt.media)


def test_media_sizes_must_fit_the_parts():
    message = {"role": "user", "content": [IMAGE]}
    for images, match in [
        ((), "1 image parts, but 0 image sizes"), ([(1, 1, 1)] * 2, "1 image parts, but 2"), ([(1, 0, 1)], "must be positive")
    ]:  # fmt: skip
        with pytest.raises(RequestError, match=match):
            render(BYTE, [message], images=images)
    video = [{"role": "user", "content": [{"type": "video", "video": b""}]}]
    for chunks in ([], [(0, 0)], [(-1, 1)], [(float("nan"), 1)]):
        with pytest.raises(RequestError, match="video 0"):
            render(BYTE, video, videos=[(1, 1, chunks)])


def test_a_tokenizer_without_media_tokens_says_so():
    full = json.loads(BPE._definition)
    for token in full["added_tokens"]:
        token["content"] = token["content"].replace("<|media_pad|>", "<|reserved|>")
    full["model"]["vocab"] = {t.replace("<|media_pad|>", "<|reserved|>"): i for t, i in full["model"]["vocab"].items()}
    old = type(BPE)(json.dumps(full))
    with pytest.raises(RequestError, match="cannot read images"):
        render(old, [{"role": "user", "content": [IMAGE]}], images=[(1, 1, 1)])
    assert render(old, HI).ids == render(BPE, HI).ids


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages is empty"),
        ("hi", "messages is of type str"),
        (None, "messages is missing"),
        (["hi"], r"messages\[0\] is of type str"),
        ([{"content": "x"}], r"messages\[0\].role is missing; allowed: system, user, assistant, tool"),
        ([HI[0], {"role": "developer", "content": "x"}], r"messages\[1\].role is 'developer'"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is of type int"),
        ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\].name is of type int; give a string"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] is 'x'; allowed are parts of type text, image_url"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text is missing"),
        ([*HI * 3, {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url"}]}],
         r"messages\[3\].content\[1\].image_url is missing"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 1}}]}], r"content\[0\].image_url is {'url': 1}"),
        ([{"role": "user", "content": [{"type": "video"}]}], r"content\[0\].video is missing"),
        ([{"role": "user", "content": "a\ud800"}], r"messages\[0\].content has the lone surrogate '.ud800' at character 1"),
        ([{"role": "assistant", "content": [IMAGE]}], r"messages\[0\].content has an image"),
        ([{"role": "assistant", "reasoning": 1}], r"messages\[0\].reasoning is of type int"),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\].tool_calls is of type dict"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"messages\[0\].tool_calls\[0\] is {'name': 'f'}"),
        ([{"role": "assistant", "tool_calls": [CALLS[0], {"function": {"name": ""}}]}], r"tool_calls\[1\].function.name is empty"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
         r"tool_calls\[0\].function.arguments is \[1\]; give a JSON object"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}]}],
         r"messages\[0\].tool_calls\[0\].function.arguments\['a'\] is of type set"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}],
         r"arguments\['a'\] has the lone surrogate"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}], "nested too deeply"),
        ([{"role": "tool", "content": "r"}], r"messages\[0\] is a tool result without a call"),
        ([{"role": "assistant", "tool_calls": CALLS}, *[{"role": "tool", "content": "r"}] * 3], r"messages\[3\].*this is result 3"),
        ([{"role": "tool", "tool": "f", "content": None}], r"messages\[0\].content is missing"),
        ([{"role": "system", "tools": [WEATHER], "content": "x"}], r"messages\[0\] has tools and content"),
        ([{"role": "system", "tools": [{"name": "f"}]}], r"messages\[0\].tools\[0\].function is missing"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused_with_the_place(messages, match):
    with pytest.raises(RequestError, match=match):
        render(BYTE, messages)
