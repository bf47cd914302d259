"""``python -m routepack_opt``."""

from __future__ import annotations

import sys

from routepack_opt.cli import main

if __name__ == "__main__":
    sys.exit(main())
