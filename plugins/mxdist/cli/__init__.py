"""The command line: ``mxdist``."""

from mxdist.cli.main import main

__all__ = ["main"]
