#!/usr/bin/env python
"""Planner of layouts: `megatronish plan` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("plan", program="plan.py"))
