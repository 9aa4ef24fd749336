"""``python -m trysquare``: the command line."""

import sys

from trysquare.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
