"""`perilune tokenize --chat` and published rank files, as a user types them."""

from __future__ import annotations

import base64
import json

import pytest

from perilune.cli import tokenize
from perilune.errors import ConfigError, RequestError
from perilune.tokenizer import ByteTokenizer, load_tokenizer
from perilune.tokenizer.xtml import Wording, render

BYTE = ByteTokenizer()
MESSAGES = [
    {"role": "user", "content": "Hi\t|"},
    {"role": "assistant", "content": "yes", "reasoning": "hm"},
    {"role": "user", "content": "and now?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = {
        "list.json": MESSAGES,
        "request.json": {
            "model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "reasoning_effort": "low",
            "response_format": {"type": "json_object"}, "stream": True,
        },
        "none.json": {"messages": MESSAGES, "reasoning_effort": "none"},
        "tools.json": [TOOLS[0] | {"function": {"name": "other"}}],
        "number.json": 5,
        "developer.json": [{"role": "developer", "content": "x"}],
    }  # fmt: skip
    for name, value in contents.items():
        (tmp_path / name).write_text(json.dumps(value))
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "wording.toml").write_text('thinking_effort = "Think: {effort}"')
    return tmp_path


def ran(capsys, *args):
    assert tokenize.run([*args, "--tokenizer", "byte", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_list_of_messages(files, capsys):
    shown = ran(capsys, "--chat", "list.json")
    prompt = render(BYTE, MESSAGES)
    assert shown["ids"] == prompt.ids and shown["message_ends"] == prompt.message_ends
    assert shown["loss_mask"] == [int(flag) for flag in prompt.loss_mask] and shown["loss_tokens"] == sum(
        prompt.loss_mask
    )
    assert shown["pieces"][0] == "<|open|>" and shown["tokens"] == len(prompt.ids)
    assert ran(capsys, "--chat", "list.json", "--no-thinking")["ids"] == render(BYTE, MESSAGES, thinking=False).ids


def test_a_whole_request_and_flags_over_it(files, capsys):
    options = {"tool_choice": "none", "response_format": {"type": "json_object"}}
    assert (
        ran(capsys, "--chat", "request.json")["ids"] == render(BYTE, MESSAGES, tools=TOOLS, effort="low", **options).ids
    )
    other = json.loads((files / "tools.json").read_text())
    args = ["--chat", "request.json", "--tools", "tools.json", "--effort", "max", "--wording", "wording.toml"]
    wording = Wording(thinking_effort="Think: {effort}")
    expected = render(BYTE, MESSAGES, tools=other, effort="max", wording=wording, **options)
    assert ran(capsys, *args)["ids"] == expected.ids
    assert ran(capsys, "--chat", "none.json")["ids"] == render(BYTE, MESSAGES, thinking=False).ids


def test_for_people_each_message_is_a_line_of_ids_and_one_of_pieces(files, capsys):
    assert tokenize.run(["--chat", "list.json", "--tokenizer", "byte"]) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    prompt = render(BYTE, MESSAGES)
    assert [int(i) for line in lines[::2] for i in line.split()] == prompt.ids and len(lines) == 8
    assert lines[1].startswith("<|open|>|m|e") and "|H|i|\\t|" in lines[1] and lines[1].endswith("<|end_of_msg|>")
    assert f"{len(prompt.ids)} tokens, 3 messages that end at {prompt.message_ends}" in summary
    assert tokenize.run(["--decode", " ".join(lines[::2]), "--tokenizer", "byte"]) == 0
    assert capsys.readouterr().out == BYTE.decode(prompt.ids, skip_special=False) + "\n"


def user(*parts):
    return json.dumps([{"role": "user", "content": list(parts)}])


def test_images_and_videos_are_read_from_the_file_s_folder_and_data_urls(tmp_path, capsys):
    """Oracle for the tokens: the published example of the resize rule, 225 x 223 pixels take 72 (architecture §8.7)."""
    image = pytest.importorskip("PIL.Image", reason="images need pillow: pip install 'perilune[vision]'")
    image.new("RGB", (225, 223)).save(tmp_path / "a.png")
    frames = [image.new("L", (56, 28), 40 * n) for n in range(6)]
    frames[0].save(tmp_path / "v.gif", save_all=True, append_images=frames[1:], duration=250, loop=0)
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    (tmp_path / "chat.json").write_text(
        user(
            {"type": "image_url", "image_url": {"url": "a.png"}},
            {"type": "video", "video": f"file://{tmp_path}/v.gif"},
            {"type": "image_url", "image_url": url},
            {"type": "text", "text": "?"},
        )
    )
    shown = "".join(ran(capsys, "--chat", str(tmp_path / "chat.json"))["pieces"])
    picture = "<|media_begin|>image 225x223<|media_content|>" + "<|media_pad|>" * 72 + "<|media_end|>"
    chunk = "<|media_begin|>video 56x28<|media_content|>" + "<|media_pad|>" * 2 + "<|media_end|>"
    assert f"{picture}00:00:00.000{chunk}00:00:01.000{chunk}{picture}?" in shown


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, r"content\[0\].image_url is https://a.b/c.png, which is not fetched"),
        ({"type": "image_url", "image_url": "data:image/png,abc"}, r"messages\[0\].content\[0\].image_url is not a base64"),
        ({"type": "image_url", "image_url": "data:image/png;base64,a"}, "not a base64"),
        ({"type": "image", "image": 5}, r"content\[0\].image is of type int"),
        ({"type": "image_url", "image_url": {"url": "none.png"}}, r"messages\[0\].content\[0\].image_url: .*none.png"),
        ({"type": "video_url", "video_url": {"url": "bad.json"}}, r"messages\[0\].content\[0\].video_url: .*bad.json"),
        ({"type": "image_url"}, r"content\[0\].image_url is missing"),
    ],
)  # fmt: skip
def test_media_refusals(files, part, match):
    pytest.importorskip("PIL.Image", reason="images need pillow: pip install 'perilune[vision]'")
    (files / "chat.json").write_text(user(part))
    with pytest.raises(RequestError, match=match):
        tokenize.run(["--chat", "chat.json", "--tokenizer", "byte"])


def test_a_published_rank_file(files, capsys):
    pytest.importorskip("tiktoken")
    tokens = [*(bytes([b]) for b in range(256)), b"me", b"mess", b"message", b"ss"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (files / "tiktoken.model").write_text("\n".join(lines))
    assert tokenize.run(["--chat", "list.json", "--tokenizer", "tiktoken.model", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["vocab_size"] == len(tokens) + 256 and shown["pieces"][:2] == ["<|open|>", "message"]
    assert shown["ids"] == render(load_tokenizer(files / "tiktoken.model"), MESSAGES).ids
    assert shown["ids"][:2] == [len(tokens) + 3, 258]
    assert tokenize.run(["message s", "--tokenizer", "tiktoken.model"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["258 32 115", "message| |s"]


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (["--chat", "list.json", "text"], ConfigError, "a text and --chat are given"),
        (["--tools", "tools.json", "text"], ConfigError, "--tools needs --chat"),
        (["--no-thinking", "--effort", "low"], ConfigError, "--effort and --no-thinking need --chat"),
        (["--chat", "nowhere.json"], RequestError, "cannot read nowhere.json"),
        (["--chat", "bad.json"], RequestError, "bad.json is not JSON"),
        (["--chat", "number.json"], RequestError, "number.json holds a int; give a list of messages"),
        (["--chat", "developer.json"], RequestError, r"messages\[0\].role is 'developer'"),
        (["--chat", "list.json", "--tools", "number.json"], RequestError, "tools is of type int"),
        (["--chat", "list.json", "--effort", "medium"], RequestError, "medium is reserved"),
        (["--chat", "list.json", "--wording", "list.json"], ConfigError, "not valid TOML"),
    ],
)
def test_refusals(files, args, error, match):
    with pytest.raises(error, match=match):
        tokenize.run([*args, "--tokenizer", "byte"])
