#!/usr/bin/env python
"""Chat with a trained model on the terminal: `megatronish chat` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("chat", program="chat.py"))
