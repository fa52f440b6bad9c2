#!/usr/bin/env python
"""Fine-tuning of a GPT: `megatronish finetune` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("finetune", program="finetune_gpt.py"))
