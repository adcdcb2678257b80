"""`python -m lightning_remat`."""

import sys

from .command_line.command import main

if __name__ == "__main__":
    sys.exit(main())
