"""Become another program that the kernel stops when its parent dies: `python leash.py PARENT_PID COMMAND ...`.

A killed test run must leave no daemon behind. The request is made here, after the fork, in a process with one thread;
asking for it between fork and exec of a threaded parent is not safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):  # it died before the request was made
    sys.exit(f"{sys.argv[0]}: parent {sys.argv[1]} is gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
