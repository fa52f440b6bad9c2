#!/usr/bin/env python
"""Measurement of collectives: `megatronish bench-collectives` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("bench-collectives", program="bench_collectives.py"))
