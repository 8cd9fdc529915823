"""`perilune generate`: continue a prompt with a trained run."""

from __future__ import annotations

import argparse
import json
import sys

from perilune.cli.answer_flags import RUN_HELP, SAMPLING_HELP, FlagParser
from perilune.errors import ConfigError

HELP = f"""usage: perilune generate --run NAME --prompt TEXT [options]

Continue a text. The prompt and its continuation go to stdout, speed and seed to stderr.

{RUN_HELP}  --prompt TEXT      the text to continue; - reads it from stdin
{SAMPLING_HELP}  --stop TEXT        end before this text; may be given several times
  --no-stream        print at the end instead of token by token
  --json             one JSON object on stdout
"""


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    parser = FlagParser("generate")
    parser.add_argument("--prompt")
    parser.add_sampling()
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    flags = parser.parse_args(args)
    if flags.help:
        print(HELP, end="")
        return 0
    if not flags.prompt:
        raise ConfigError('generate: --prompt TEXT is needed: the text to continue, for example --prompt "def "')
    params = parser.sampling(flags)
    prompt = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    job = parser.engine(flags).complete([prompt], params)
    stream = flags.stream and not flags.json
    if stream:
        print(prompt, end="", flush=True)
    text, reason = "", None
    try:
        for delta in job:
            text += delta.text
            reason = delta.finish_reason
            if stream:
                print(delta.text, end="", flush=True)
    finally:
        if stream:
            print(flush=True)
    usage, timing = job.usage, job.timing
    if flags.json:
        print(
            json.dumps(
                {
                    "prompt": prompt,
                    "text": text,
                    "finish_reason": reason,
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "prefill_seconds": timing.prefill_seconds,
                    "decode_seconds": timing.decode_seconds,
                    "tokens_per_second": timing.tokens_per_second,
                    "seed": params.seed,
                }
            )
        )
        return 0
    if not stream:
        print(prompt + text)
    print(
        f"{usage.completion_tokens} tokens at {timing.tokens_per_second:.0f} tokens/s after {usage.prompt_tokens} prompt "
        f"tokens in {timing.prefill_seconds:.2f} s; ended by {'the token limit' if reason == 'length' else 'a stop'}; "
        f"seed {params.seed}",
        file=sys.stderr,
    )
    return 0
