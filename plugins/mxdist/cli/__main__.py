"""``python -m mxdist.cli``."""

import sys

from mxdist.cli.main import main

sys.exit(main())
