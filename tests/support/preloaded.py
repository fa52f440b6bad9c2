"""What ranks of the theorem import, loaded once in the server that they are forked from (ranks.py).

The server looks for modules in the working directory alone: so it finds this one by its folder, where tests are started
in the root of the repository, and the others by the path that is made here. Elsewhere each rank imports them itself.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(path) for path in (Path(__file__).parent, Path(__file__).parents[1]) if str(path) not in sys.path]

import comparison  # noqa: E402, F401
import expert_cases  # noqa: E402, F401
