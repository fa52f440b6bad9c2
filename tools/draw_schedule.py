#!/usr/bin/env python
"""Drawings of pipeline schedules: `megatronish draw` as a script of the checkout."""

import sys

from megatronish.commands.draw import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="draw_schedule.py"))
