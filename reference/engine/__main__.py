"""`python -m reference.engine`: the HTTP server and its ranks.

Imports nothing heavy: the work is done by `reference.engine.launcher`, in a child of the fork server if any.
"""

import sys

from reference.command_line import ENGINE
from reference.engine.forkserver import run_command

if __name__ == "__main__":
    sys.exit(run_command(ENGINE, "reference.engine.launcher", sys.argv[1:]))
