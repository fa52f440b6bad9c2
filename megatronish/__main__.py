"""Entry of `python -m megatronish` and of the installed command `megatronish`, which are the same program."""

import sys

from megatronish.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
