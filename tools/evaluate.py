#!/usr/bin/env python
"""Perplexity of a model on a text: `megatronish evaluate` as a script of the checkout."""

import sys

from megatronish.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="evaluate.py"))
