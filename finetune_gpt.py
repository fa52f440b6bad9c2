#!/usr/bin/env python
"""Fine-tuning of a GPT: `megatronish finetune` as a script of the checkout."""

import sys

from megatronish.commands.finetune import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="finetune_gpt.py"))
