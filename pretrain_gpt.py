#!/usr/bin/env python
"""Pretraining of a GPT: `megatronish pretrain` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("pretrain", program="pretrain_gpt.py"))
