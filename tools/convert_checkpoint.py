#!/usr/bin/env python
"""Converter of models: `megatronish convert` as a script of the checkout."""

import sys

from megatronish.commands.convert import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="convert_checkpoint.py"))
