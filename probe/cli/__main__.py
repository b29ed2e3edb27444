"""`python -m probe.cli`."""

import sys

from probe.cli import main

if __name__ == "__main__":
    sys.exit(main())
