"""``python -m trysquare``."""

from trysquare.cli import main

raise SystemExit(main())
