#!/usr/bin/env python
"""Collector of a text corpus: `megatronish collect-corpus` as a script of the checkout."""

import sys

from megatronish.commands.collect_corpus import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="collect_corpus.py"))
