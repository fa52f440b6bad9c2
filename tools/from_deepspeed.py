"""DeepSpeed's ds_config.json as a TOML config of this project: python tools/from_deepspeed.py ds_config.json

What has no counterpart is listed in comments at the end of the TOML. Exit status: 0 done, 2 the file is not readable.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))  # where the package is not installed

from megatronish.commands.main import ended


def main() -> int:
    """The exit status."""
    from megatronish.config.importers.command import run_importer  # late: what is missing for it is told by `ended`

    return run_importer("deepspeed", sys.argv[1:])


if __name__ == "__main__":
    sys.exit(ended(main))
