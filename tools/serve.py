#!/usr/bin/env python
"""Server of a trained model with the interface of OpenAI: `megatronish serve` as a script of the checkout."""

import sys

from megatronish.commands.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="serve.py"))
