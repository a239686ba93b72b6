"""`python -m reference.daemon`: one weight cache daemon a rank, for engines to attach to.

Imports nothing heavy: the work is done by `reference.cache.supervisor`, in a child of the fork server if any.
"""

import sys

from reference.command_line import DAEMON
from reference.engine.forkserver import run_command

if __name__ == "__main__":
    sys.exit(run_command(DAEMON, "reference.cache.supervisor", sys.argv[1:]))
