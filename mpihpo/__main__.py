"""``python -m mpihpo``."""

import sys

from mpihpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
