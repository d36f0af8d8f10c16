"""`python -m weft` is `weft`."""

import sys

from weft.cli.main import main

# Not in processes that import this module again to begin.
if __name__ == "__main__":
    sys.exit(main())
