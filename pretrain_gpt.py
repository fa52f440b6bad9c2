#!/usr/bin/env python
"""Pretraining of a GPT: `megatronish pretrain` as a script of the checkout."""

import sys

from megatronish.commands.pretrain import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="pretrain_gpt.py"))
