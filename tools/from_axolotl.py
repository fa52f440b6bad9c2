"""Axolotl's config.yml as a TOML config of this project: python tools/from_axolotl.py config.yml

What has no counterpart is listed in comments at the end of the TOML. Exit status: 0 done, 2 the file is not readable.
"""

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))  # where the package is not installed

from megatronish.commands.main import ended

if __name__ == "__main__":
    # Imported late: a library that is missing for it is named by `ended`.
    command = "megatronish.config.importers.command"
    sys.exit(ended(lambda: int(import_module(command).run_importer("axolotl", sys.argv[1:]))))
