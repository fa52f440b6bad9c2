#!/usr/bin/env python
"""Drawings of pipeline schedules: `megatronish draw` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("draw", program="draw_schedule.py"))
