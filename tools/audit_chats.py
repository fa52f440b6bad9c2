#!/usr/bin/env python
"""Audit of chat data: `megatronish audit` as a script of the checkout."""

import sys

from megatronish.commands.audit import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="audit_chats.py"))
