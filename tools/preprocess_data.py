#!/usr/bin/env python
"""Preprocessing of JSON lines: `megatronish preprocess` as a script of the checkout."""

import sys

from megatronish.commands.preprocess import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="preprocess_data.py"))
