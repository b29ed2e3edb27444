"""`python -m probe.commands`."""

import sys

from probe.commands import main

if __name__ == "__main__":
    sys.exit(main())
