#!/usr/bin/env python
"""DeepSpeed's ds_config.json as TOML: `megatronish from-deepspeed` as a script of the checkout."""

import sys

from megatronish.commands.main import run_script

if __name__ == "__main__":
    sys.exit(run_script("from-deepspeed", program="from_deepspeed.py"))
