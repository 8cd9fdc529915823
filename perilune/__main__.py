"""`python -m perilune`: the command line from a source tree, with no installation."""

from __future__ import annotations

import sys

from perilune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
