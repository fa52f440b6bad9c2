#!/usr/bin/env python
"""Preprocessing of JSON lines: `megatronish preprocess` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("preprocess", program="preprocess_data.py"))
