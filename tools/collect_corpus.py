#!/usr/bin/env python
"""Collector of a text corpus: `megatronish collect-corpus` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("collect-corpus", program="collect_corpus.py"))
