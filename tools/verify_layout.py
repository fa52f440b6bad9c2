#!/usr/bin/env python
"""Comparison of a layout with one process: `megatronish verify` as a script of the checkout."""

import sys

from megatronish.commands.verify import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="verify_layout.py"))
