"""DeepSpeed's ds_config.json as a TOML config of this project: python tools/from_deepspeed.py ds_config.json

What has no counterpart is listed in comments at the end of the TOML. Exit status: 0 done, 2 the file is not readable.
"""

import sys

from megatronish.commands.main import ended
from megatronish.config.importers.command import run_importer

if __name__ == "__main__":
    sys.exit(ended(lambda: run_importer("deepspeed", sys.argv[1:])))
