#!/usr/bin/env python
"""Text generation: `megatronish generate` as a script of the checkout."""

import sys

from megatronish.commands.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="generate.py"))
