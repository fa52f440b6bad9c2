#!/usr/bin/env python
"""Planner of layouts: `megatronish plan` as a script of the checkout."""

import sys

from megatronish.commands.plan import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="plan.py"))
