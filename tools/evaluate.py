#!/usr/bin/env python
"""Perplexity of a model on a text: `megatronish evaluate` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("evaluate", program="evaluate.py"))
