"""`python -m fsdp_compiled COMMAND` is `fsdp-compiled COMMAND`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
