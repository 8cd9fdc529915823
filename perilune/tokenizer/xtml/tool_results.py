"""Which call a tool result answers, and in which order results are shown to the model.

Results stand in the order of the calls, whatever order they arrived in: a run of tool messages is matched to the calls
of the last assistant message by `tool_call_id`, or by the alias `{name}:{position from 0}`. If one result of a run
answers no known call, the run keeps its order (architecture §10.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from perilune.errors import RequestError
from perilune.tokenizer.xtml.messages import Call, Message


def in_call_order(messages: Sequence[Message]) -> Iterator[tuple[Message, int]]:
    """The messages with tool results named and put in order.

    Yields:
        Each message, and for a tool result its `index`: how many results there were since the last assistant message,
        itself included. 0 for other messages.

    Raises:
        RequestError: a result that answers no call and does not say which tool it is from.
    """
    calls: tuple[Call, ...] = ()
    count = 0
    for is_result, run in groupby(messages, key=lambda message: message.role == "tool"):
        if not is_result:
            for message in run:
                if message.role == "assistant":
                    calls, count = message.calls, 0
                yield message, 0
            continue
        for message in _matched(list(run), calls):
            count += 1
            name = message.name or (calls[count - 1].name if count <= len(calls) else None)
            if name is None:
                raise RequestError(
                    f"{message.where} is a tool result without a call: the last assistant message has {len(calls)} "
                    f"tool_calls and this is result {count}; give tool_call_id, tool or name"
                )
            yield replace(message, name=name), count


def _matched(run: list[Message], calls: Sequence[Call]) -> list[Message]:
    """The run in call order, named after its calls; as it is if one of them answers no call."""
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.identity is not None:
            positions.setdefault(call.identity, position)
    for position, call in enumerate(calls):
        positions.setdefault(f"{call.name}:{position}", position)
    found = [positions.get(message.answers) if message.answers is not None else None for message in run]
    known = [(position, message) for position, message in zip(found, run) if position is not None]
    if len(known) < len(run):
        return run
    return [
        replace(message, name=calls[position].name) for position, message in sorted(known, key=lambda pair: pair[0])
    ]
