#!/usr/bin/env python
"""Comparison of a layout with one process: `megatronish verify` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("verify", program="verify_layout.py"))
