"""The sentences of the chat format's option messages, as data.

Tags, attributes, escaping and positions are fixed by the format; what the option messages *say* is not. The wording
here is our own: a model trained here learns it. Whoever serves a published model writes that model's wording into a
TOML file with the keys of `Wording` and gives it to the renderer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from perilune.config.parse import from_dict, load_toml
from perilune.errors import ConfigError

_BARE_JSON = "Write the response as bare JSON: no code fence around it, and no other formatting."


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """The body of each option message (architecture §10.2, table); `{word}` is where a value goes.

    Attributes:
        tools_declared: introduces `{tools}`, the tools of the whole conversation as JSON.
        tools_added: introduces `{tools}` that a system message adds on the way; earlier ones stay.
        thinking_effort: explains the option and states `{effort}`.
        tool_choice_required: the next message must call tools.
        tool_choice_none: the next message must not call tools.
        response_json_object: the response must be bare JSON.
        response_json_schema: the same, and it must satisfy `{schema}`.
    """

    tools_declared: str = "# Callable tools\nEach entry names a tool and describes its parameters as a JSON Schema.\n\n```json\n{tools}\n```"
    tools_added: str = (
        "## Additional tools\nMore tools can be called from here on, and all earlier ones still can.\n"
        "Each new entry names a tool and describes its parameters as a JSON Schema.\n\n```json\n{tools}\n```"
    )
    thinking_effort: str = (
        "The option `thinking_effort` says how much to think in the think channel; it does not concern the response. "
        "Its values are `low`, `medium`, `high` and `max`.\nIn force: `thinking_effort={effort}`."
    )
    tool_choice_required: str = "Option `tool_choice=required` is set.\nThe next message has to call at least one tool."
    tool_choice_none: str = "Option `tool_choice=none` is set.\nThe next message may not call any tool."
    response_json_object: str = f"Option `response_format=json_object` is set.\n{_BARE_JSON}"
    response_json_schema: str = (
        f"Option `response_format=json_schema` is set.\n{_BARE_JSON}\n"
        "The JSON has to satisfy this schema:\n```json\n{schema}\n```"
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            text, carried = getattr(self, field.name), _CARRIED.get(field.name)
            if carried and f"{{{carried}}}" not in text:
                raise ConfigError(f"the wording {field.name} lacks the placeholder {{{carried}}}: {text!r}")
            for word in _PLACEHOLDER.findall(text):
                if word != carried:
                    allowed = f"only {{{carried}}}" if carried else "no placeholder"
                    raise ConfigError(f"the wording {field.name} has the placeholder {{{word}}}; it can have {allowed}")

    def fill(self, message: str, value: str = "") -> str:
        """Body of an option message with its value put in; white space around it is dropped.

        The value is put in as it is: a `{word}` inside a tool's description stays what it is.
        """
        text = getattr(self, message)
        carried = _CARRIED.get(message)
        return (text.replace(f"{{{carried}}}", value) if carried else text).strip()


_CARRIED = {
    "tools_declared": "tools",
    "tools_added": "tools",
    "thinking_effort": "effort",
    "response_json_schema": "schema",
}
_PLACEHOLDER = re.compile(r"\{(tools|effort|schema)\}")

DEFAULT = Wording()
"""Our own wording."""


def load_wording(path: Path) -> Wording:
    """Read a TOML file whose keys are attributes of `Wording`; those it leaves out keep the default.

    Raises:
        ConfigError: the file cannot be read or is not TOML; an unknown key (the nearest known one is named), a value
            that is not text, a placeholder that is missing or does not belong there.
    """
    try:
        return from_dict(Wording, load_toml(path))
    except ConfigError as error:
        raise ConfigError(f"wording file {path}: {error}") from None
