#!/usr/bin/env python
"""Axolotl's config.yml as TOML: `megatronish from-axolotl` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("from-axolotl", program="from_axolotl.py"))
