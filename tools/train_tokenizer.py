#!/usr/bin/env python
"""Training of a tokenizer: `megatronish train-tokenizer` as a script of the checkout."""

import sys

from megatronish.commands.train_tokenizer import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="train_tokenizer.py"))
