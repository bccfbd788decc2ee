"""``python -m mxdist.cli``."""

import sys

from mxdist.cli import main

sys.exit(main())
