"""FlashAttention, wall by wall: the solution modules that every notebook imports."""

import sys as _sys

# First of all: it decides whether Triton interprets, before anything imports triton.
try:
    from flashlab import runtime as runtime
except (ImportError, OSError):
    # Without a torch that loads there is nothing to teach; but `flashlab doctor` is there to say just that.
    if not _sys.argv[0].endswith("/flashlab"):
        raise

__version__ = "0.1.0"
