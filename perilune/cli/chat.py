"""`perilune chat`: talk to a run in the terminal or the browser."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict

from perilune.cli.answer_flags import RUN_HELP, SAMPLING_HELP, FlagParser
from perilune.errors import ConfigError, RequestError
from perilune.serve.chat_session import ChatSession

HELP = f"""usage: perilune chat --run NAME [options]

Talk to a run. In the terminal: /reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer.
A run without a chat stage answers in the style of its training text.

{RUN_HELP}  --once TEXT        one question, one answer, then leave
  --web              talk in the browser instead; --port P (default 8000)
  --system TEXT      system message
{SAMPLING_HELP}  --json             with --once: one JSON object on stdout
"""


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    parser = FlagParser("chat")
    parser.add_argument("--once")
    parser.add_argument("--web", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--system", default="")
    parser.add_sampling()
    flags = parser.parse_args(args)
    if flags.help:
        print(HELP, end="")
        return 0
    if flags.json and flags.once is None:
        raise ConfigError("chat: --json needs --once TEXT; for programs there is perilune serve")
    if flags.web and flags.once is not None:
        raise ConfigError("chat: --web and --once exclude each other")
    params = parser.sampling(flags)
    engine = parser.engine(flags)
    if flags.web:
        from perilune.cli.serve import serve_run

        return serve_run(engine, port=flags.port)
    session = ChatSession(engine, params, system=flags.system)
    if flags.once is None:
        return _talk(session)
    answer = _say(session, flags.once, quiet=flags.json)
    if flags.json:
        print(json.dumps({
            "text": answer, "finish_reason": session.finish_reason, **asdict(session.usage), **asdict(session.timing),
            "seed": params.seed,
        }))  # fmt: skip
    return 0


def _talk(session: ChatSession) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    print(f"{session.engine.name}: /reset forgets, /quit leaves, Ctrl-C stops an answer", file=sys.stderr)
    while True:
        try:
            text = input("› ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(/quit leaves)", file=sys.stderr)
            continue
        if text == "/quit":
            return 0
        if text == "/reset":
            session.reset()
            print("(forgotten)", file=sys.stderr)
        elif text.startswith("/"):
            print(f"unknown command {text.split()[0]}; there are /reset and /quit", file=sys.stderr)
        elif text:
            try:
                _say(session, text)
            except KeyboardInterrupt:
                print("\n(stopped)", file=sys.stderr)
            except RequestError as error:
                print(f"error: {error}", file=sys.stderr)


def _say(session: ChatSession, text: str, *, quiet: bool = False) -> str:
    """Ask, print the answer while it is drawn and its counts after it; returns the answer."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    answer = ""
    with contextlib.closing(session.send(text)) as deltas:
        for delta in deltas:
            answer += delta.text
            if not quiet:
                reasoning = f"{dim}{delta.reasoning}{plain}" if delta.reasoning else ""
                print(reasoning + delta.text, end="", flush=True)
    if not quiet:
        print(flush=True)
        usage = session.usage
        print(
            f"{dim}{usage.cached_tokens} cached · {usage.prompt_tokens - usage.cached_tokens} run · "
            f"{usage.completion_tokens} drawn · {session.timing.tokens_per_second:.0f} tokens/s{plain}",
            file=sys.stderr,
        )
    return answer
