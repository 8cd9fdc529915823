"""The wording of option messages is data that a user can replace."""

from __future__ import annotations

import dataclasses

import pytest

from perilune.config.parse import to_toml
from perilune.errors import ConfigError
from perilune.tokenizer import ByteTokenizer
from perilune.tokenizer.xtml import Wording, load_wording, render
from perilune.tokenizer.xtml.template import DEFAULT

BYTE = ByteTokenizer()
TOOLS = [{"type": "function", "function": {"name": "f", "description": "{tools} {effort} {schema}"}}]


def prompt_of(wording):
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "tools": TOOLS}]
    shape = {"type": "json_schema", "json_schema": {"schema": {"title": "{effort}"}}}
    ids = render(
        BYTE, messages, tools=TOOLS, effort="high", tool_choice="none", response_format=shape, wording=wording
    ).ids
    return BYTE.decode(ids, skip_special=False)


def test_every_text_of_a_prompt_comes_from_the_wording():
    """Replacing all of it leaves tags, attributes, values and the conversation, and nothing else."""
    bare = {
        f.name: "".join(f"{{{w}}}" for w in ("tools", "effort", "schema") if f"{{{w}}}" in f.default)
        for f in dataclasses.fields(Wording)
    }
    json = '[{"function":{"description":"{tools} {effort} {schema}","name":"f"},"type":"function"}]'
    system = '<|open|>message role="system" type="{}"<|sep|>{}<|close|>message<|sep|><|end_of_msg|>'
    assert prompt_of(Wording(**bare)) == (
        system.replace("{}", "tool-declare", 1).replace("{}", json)
        + system.replace("{}", "thinking-effort", 1).replace("{}", "high")
        + '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
        + system.replace("{}", "tool-declare", 1).replace("{}", json)
        + system.replace("{}", "tool-choice", 1).replace("{}", "")
        + system.replace("{}", "response-format", 1).replace("{}", '{"title":"{effort}"}')
        + '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )  # fmt: skip


def test_default_wording_has_the_parts_that_the_format_describes():
    prompt = prompt_of(DEFAULT)
    for fenced in (
        '\n\n```json\n[{"function"',
        '"type":"function"}]\n```<|close|>',
        '```json\n{"title":"{effort}"}\n```<|close|>',
    ):
        assert fenced in prompt
    assert "`thinking_effort=high`" in prompt and "`tool_choice=none`" in prompt
    for name in ("tool_choice_required", "tool_choice_none", "response_json_object"):
        assert getattr(DEFAULT, name).count("\n") == 1, "two lines"


def test_a_file_changes_the_prompt_and_keeps_the_rest(tmp_path):
    path = tmp_path / "wording.toml"
    path.write_text('thinking_effort = """\nEffort is {effort}, no more.\n"""\ntool_choice_none = "No tools."\n')
    wording = load_wording(path)
    changed = prompt_of(wording)
    assert "<|sep|>Effort is high, no more.<|close|>" in changed and "<|sep|>No tools.<|close|>" in changed
    assert changed != prompt_of(DEFAULT) and wording.tools_added == DEFAULT.tools_added
    path.write_text(to_toml(DEFAULT))
    assert load_wording(path) == DEFAULT


def test_other_braces_are_text():
    wording = Wording(thinking_effort='Like {"effort": 1} and {0} {}: {effort}, {effort}')
    assert '<|sep|>Like {"effort": 1} and {0} {}: high, high<|close|>' in prompt_of(wording)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('thinking_efort = "{effort}"', "unknown setting thinking_efort; perhaps you meant thinking_effort"),
        ('thinking_effort = "think"', "thinking_effort lacks the placeholder {effort}: 'think'"),
        ('tools_added = "{Tools}"', "tools_added lacks the placeholder {tools}"),
        (
            'tools_declared = "{tools} {schema}"',
            "tools_declared has the placeholder {schema}; it can have only {tools}",
        ),
        ('tool_choice_none = "{tools}"', "tool_choice_none has the placeholder {tools}; it can have no placeholder"),
        ("tool_choice_none = 5", "tool_choice_none=5 must be of type str"),
        ("tool_choice_none = ", "not valid TOML"),
    ],
)
def test_wrong_files_are_refused_with_the_key(tmp_path, text, match):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="mine.toml") as caught:
        load_wording(path)
    assert match in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_wording(tmp_path / "none.toml")
