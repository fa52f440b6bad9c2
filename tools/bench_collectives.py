#!/usr/bin/env python
"""Measurement of collectives: `megatronish bench-collectives` as a script of the checkout."""

import sys

from megatronish.commands.bench_collectives import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="bench_collectives.py"))
