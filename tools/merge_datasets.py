#!/usr/bin/env python
"""Merging of .bin/.idx pairs: `megatronish merge` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("merge", program="merge_datasets.py"))
