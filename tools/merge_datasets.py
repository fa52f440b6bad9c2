#!/usr/bin/env python
"""Merging of .bin/.idx pairs: `megatronish merge` as a script of the checkout."""

import sys

from megatronish.commands.merge import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="merge_datasets.py"))
