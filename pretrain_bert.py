#!/usr/bin/env python
"""Pretraining of a BERT: `megatronish pretrain-bert` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("pretrain-bert", program="pretrain_bert.py"))
