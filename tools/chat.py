#!/usr/bin/env python
"""Chat with a trained model on the terminal: `megatronish chat` as a script of the checkout."""

import sys

from megatronish.commands.chat import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="chat.py"))
