"""The command line: ``mxdist``."""

import sys

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> int:
    """Run the command line, and tell of a Ctrl-C in one line, however early it comes: also while modules are loaded.

    :return: what the process should exit with.
    """
    try:
        from mxdist.cli.commands import main as run

        return run()
    except KeyboardInterrupt:
        print("mxdist: interrupted", file=sys.stderr)
        return _INTERRUPTED
