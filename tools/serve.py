#!/usr/bin/env python
"""Server of a trained model with the interface of OpenAI: `megatronish serve` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("serve", program="serve.py"))
