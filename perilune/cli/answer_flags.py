"""What `generate`, `chat` and `serve` share: naming a run, and how answers are drawn."""

from __future__ import annotations

import argparse
import secrets
from typing import TYPE_CHECKING, Any, NoReturn

from perilune.errors import ConfigError
from perilune.serve.request import FieldError, SamplingParams

if TYPE_CHECKING:
    from perilune.serve.local_engine import LocalEngine

RUN_HELP = """  --run NAME|PATH    the run; a bare name lives under runs/ (--model is the same)
  --step N           which checkpoint (default: the newest whole one)
  --device D         auto | cpu | cuda (default: auto)
"""
SAMPLING_HELP = """  --temperature T    0 = always the most likely token (default 0.7)
  --top-k K          only the K most likely tokens; 0 = all (default)
  --top-p P          only the most likely tokens that reach probability P (default 0.95)
  --min-p P          only tokens at least P times as likely as the most likely one (default 0)
  --seed N           same seed, same text (default: a new one)
  --max-tokens N     end after N tokens (default 256)
"""


class FlagParser(argparse.ArgumentParser):
    """A parser of one verb: its help text is written by hand, its errors are ours."""

    def __init__(self, verb: str) -> None:
        super().__init__(prog=f"perilune {verb}", add_help=False, allow_abbrev=False)
        self.verb = verb
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("--run", "--model", dest="run")
        self.add_argument("--step", type=int)
        self.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        self.add_argument("--json", action="store_true")

    def error(self, message: str) -> NoReturn:
        """Bad usage.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.verb}: {message}; see perilune {self.verb} --help")

    def add_sampling(self) -> None:
        """Flags of `SamplingParams`."""
        self.add_argument("--temperature", type=float)
        self.add_argument("--top-k", type=int, default=0)
        self.add_argument("--top-p", type=float, default=0.95)
        self.add_argument("--min-p", type=float, default=0.0)
        self.add_argument("--seed", type=int)
        self.add_argument("--max-tokens", type=int, default=256)

    def sampling(self, flags: argparse.Namespace, *, temperature: float = 0.7) -> SamplingParams:
        """Parameters from the flags; a seed is chosen if none was given, so that it can be told.

        Args:
            flags: as parsed.
            temperature: where the flags name none.

        Raises:
            ConfigError: a value out of range.
        """
        if flags.temperature is not None:
            temperature = flags.temperature
        seed = secrets.randbelow(2**31) if flags.seed is None else flags.seed
        try:
            return SamplingParams(
                temperature=temperature, top_k=flags.top_k, top_p=flags.top_p, min_p=flags.min_p, seed=seed,
                max_tokens=flags.max_tokens, stop=tuple(getattr(flags, "stop", ())),
            )  # fmt: skip
        except FieldError as error:
            raise ConfigError(f"--{str(error).replace('_', '-', error.param.count('_'))}") from None

    def engine(self, flags: argparse.Namespace, **options: Any) -> LocalEngine:
        """Load the run that the flags name; `options` are those of `load_engine`.

        Raises:
            ConfigError: none was named.
            CheckpointError: it cannot be loaded.
        """
        if not flags.run:
            raise ConfigError(f"{self.verb}: --run NAME is needed: which run is to answer?")
        from perilune.serve.run_engine import load_engine

        return load_engine(flags.run, device=flags.device, step=flags.step, **options)
