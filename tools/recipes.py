#!/usr/bin/env python
"""Recipes for named models: `megatronish recipes` as a script of the checkout."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))  # where the package is not installed

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("recipes", program="recipes.py"))
