"""`perilune chat`: talk to a run in the terminal or the browser."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from perilune.cli.answer_flags import RUN_HELP, SAMPLING_HELP, FlagParser
from perilune.errors import ConfigError, RequestError
from perilune.serve.chat_session import ChatSession

HELP = f"""usage: perilune chat --run NAME [options]

Talk to a run. In the terminal: /image FILE shows a picture with the next message, /reset forgets the conversation,
/quit (or Ctrl-D) leaves, Ctrl-C stops an answer.
A run without a chat stage answers in the style of its training text.

{RUN_HELP}  --once TEXT        one question, one answer, then leave
  --image FILE …     pictures (png, jpg, webp, gif …) that are shown with the first message; the temperature
                     is then 0 unless it is given
  --web              talk in the browser instead; --port P (default 8000)
  --system TEXT      system message
{SAMPLING_HELP}  --json             with --once: one JSON object on stdout
"""


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    parser = FlagParser("chat")
    parser.add_argument("--once")
    parser.add_argument("--image", nargs="+", action="extend", type=Path, default=[])
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
    if flags.web and flags.image:
        raise ConfigError("chat: --image is for the terminal; leave it or --web out")
    params = parser.sampling(flags, temperature=0.0 if flags.image else 0.7)  # a picture has one right caption
    for path in flags.image:
        _check_image(path)
    engine = parser.engine(flags)
    if flags.web:
        from perilune.cli.serve import serve_page

        return serve_page(engine, flags.port)
    session = ChatSession(engine, params, system=flags.system)
    if flags.once is None:
        return _talk(session, flags.image)
    answer = _say(session, flags.once, flags.image, quiet=flags.json)
    if flags.json:
        print(json.dumps({
            "text": answer, "finish_reason": session.finish_reason, **asdict(session.usage), **asdict(session.timing),
            "seed": params.seed,
        }))  # fmt: skip
    return 0


def _check_image(path: Path) -> None:
    """RequestError, which names the file, unless it is a picture that can be read."""
    from perilune.data.image import ImageProcessor

    if not path.is_file():
        raise RequestError(f"there is no file {path}; give the path of a picture (png, jpg, webp, gif …)")
    ImageProcessor().process(path)


def _talk(session: ChatSession, images: Sequence[Path] = ()) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    print(
        f"{session.engine.name}: /image FILE shows, /reset forgets, /quit leaves, Ctrl-C stops an answer",
        file=sys.stderr,
    )
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
            images = ()
            print("(forgotten)", file=sys.stderr)
        elif text.split(maxsplit=1)[:1] == ["/image"]:
            images = [*images, *_shown(text)]
        elif text.startswith("/"):
            print(f"unknown command {text.split()[0]}; there are /image FILE, /reset and /quit", file=sys.stderr)
        elif text:
            try:
                shown, images = images, ()
                _say(session, text, shown)
            except KeyboardInterrupt:
                print("\n(stopped)", file=sys.stderr)
            except RequestError as error:
                print(f"error: {error}", file=sys.stderr)


def _shown(command: str) -> list[Path]:
    """The picture that `/image FILE` names; none, with an error on stderr, if it cannot be read."""
    name = command.removeprefix("/image").strip().strip("'\"")
    try:
        if not name:
            raise RequestError("/image needs the path of a picture")
        path = Path(name).expanduser()
        _check_image(path)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return []
    print(f"({path} is shown with the next message)", file=sys.stderr)
    return [path]


def _say(session: ChatSession, text: str, images: Sequence[Path] = (), *, quiet: bool = False) -> str:
    """Ask, print the answer while it is drawn and its counts after it; returns the answer."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    answer = ""
    with contextlib.closing(session.send(text, images)) as deltas:
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
