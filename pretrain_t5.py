#!/usr/bin/env python
"""Pretraining of a T5: `megatronish pretrain-t5` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("pretrain-t5", program="pretrain_t5.py"))
