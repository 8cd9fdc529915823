"""What an assistant may say, as a grammar for constrained decoding (architecture §10.3).

    completion(thinking)     := text </think> <response> body </response> [tools] [</message>] end
    completion(not thinking) := body </response> [tools] [</message>] end
    tools                    := <tools> call+ </tools>
    call                     := <call tool="NAME" index="i"> argument* </call>          i counts from 1
    argument                 := <argument key="KEY" type="TYPE"> value </argument>

Tags are control ids around ordinary text, so no text can end an element. The parser (`perilune.tokenizer.xtml.parse`)
reads without a problem exactly what the grammar allows, within three bounds that keep an answer finite: 32 calls, 64
characters a name of an undeclared argument, little white space in JSON. `index` counts, as in the prompts that the
renderer writes, and not any number as in the engines: an answer then renders to the ids that were drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perilune.errors import RequestError
from perilune.tokenizer.interface import Tokenizer
from perilune.tokenizer.xtml.grammar_mask import TokenMask
from perilune.tokenizer.xtml.grammar_schema import Markers, Rules, argument_rules, free_arguments, literal
from perilune.tokenizer.xtml.markup import escape

MOST_CALLS = 32
"""Calls that a constrained answer can hold."""


def needs_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    response_format: Mapping[str, Any] | None,
    *,
    parallel: bool = True,
) -> bool:
    """Whether a request promises something about its answer that only a grammar can keep."""
    if response_format is not None and response_format.get("type") in ("json_object", "json_schema"):
        return True
    if not tools or tool_choice == "none":
        return False
    return tool_choice != "auto" or not parallel or any(tool["function"].get("strict") is True for tool in tools)


def answer_mask(tokenizer: Tokenizer, **request: Any) -> TokenMask:
    """`answer_grammar` of a request, ready for a tokenizer. RequestError without llguidance, or see there."""
    try:
        return TokenMask(tokenizer, answer_grammar(tokenizer, **request))
    except RecursionError:
        raise RequestError("a schema of tools or response_format is nested too deeply; make it flatter") from None


def answer_grammar(
    tokenizer: Tokenizer,
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] = "auto",
    response_format: Mapping[str, Any] | None = None,
    response: Callable[[Rules], str] | None = None,
    parallel: bool = True,
) -> str:
    """The grammar in llguidance's Lark dialect.

    Args:
        tokenizer: whose control ids it names.
        thinking: which tag the prompt has left open.
        tools: OpenAI tools. Arguments obey a tool's `parameters`, unless it says `"strict": false`.
        tool_choice: "auto", "none", "required", or the OpenAI object that names one function, which is called once.
        response_format: OpenAI object; the response is then JSON, or empty in front of calls.
        response: makes the rule of another form of the response, treated like that of `response_format`.
        parallel: whether one answer may hold several calls.

    Raises:
        RequestError: a schema cannot be enforced, or `tool_choice` names no tool.
    """
    special = tokenizer.special
    markers = Markers(*(f"<[{token_id}]>" for token_id in (special.open, special.close, special.sep)))
    rules = Rules()

    def opened(tag: str) -> str:
        return f"{markers.open} {literal(tag)} {markers.sep}"

    def closed(tag: str) -> str:
        return f"{markers.close} {literal(tag)} {markers.sep}"

    text = rules.terminal("/(?s:.*)/")
    named = None
    if isinstance(tool_choice, Mapping):
        named = tool_choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == named]
        if not tools:
            raise RequestError(f"tool_choice names the function {named!r}, which is not among tools")
    forced = named is not None or tool_choice == "required"
    if forced and not tools:
        raise RequestError(f"tool_choice is {tool_choice!r}, and there are no tools to choose from")
    body = response(rules) if response is not None else _json_body(rules, response_format) or text
    end = closed("response")
    if tools and tool_choice != "none":
        most = 1 if named is not None or not parallel else MOST_CALLS
        calls = f"{opened('tools')} {_calls(rules, markers, tools, most)} {closed('tools')}"
        if body == text:
            answer = f"{text} {end} {calls}" if forced else f"{text} {end} ({calls})?"
        else:
            answer = f"({body})? {end} {calls}" if forced else f"({body} {end} ({calls})?) | ({end} {calls})"
    else:
        answer = f"{body} {end}"
    thought = f"{text} {closed('think')} {opened('response')} " if thinking else ""
    return "\n".join([f"start: {thought}({answer}) ({closed('message')})?", *rules.lines, ""])


def _json_body(rules: Rules, response_format: Mapping[str, Any] | None) -> str | None:
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return rules.json({"type": "object"})
    if kind == "json_schema":
        return rules.json(response_format["json_schema"].get("schema", {"type": "object"}))
    raise RequestError(f"response_format.type is {kind!r}; allowed: text, json_object, json_schema")


def _calls(rules: Rules, markers: Markers, tools: Sequence[Mapping[str, Any]], most: int) -> str:
    """Name of a rule for 1 to `most` calls."""
    heads = []
    for position, tool in enumerate(tools):
        function = tool["function"]
        if function.get("strict") is False:
            arguments = f"({free_arguments(rules, markers)})*"
        else:
            where = f"tools[{position}].function.parameters"
            arguments = argument_rules(rules, markers, function.get("parameters"), where)
        heads.append((literal(f'call tool="{escape(function["name"])}"'), rules.rule(arguments)))
    following = ""
    for number in range(most, 0, -1):
        index = literal(f' index="{number}"')
        one = " | ".join(f"{head} {index} {markers.sep} {arguments}" for head, arguments in heads)
        following = rules.rule(f'{markers.open} ({one}) {markers.close} "call" {markers.sep} {following}')
        following = f"({following})?" if number > 1 else following
    return following
