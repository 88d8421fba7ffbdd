"""python -m lpnet is lpnet."""

import sys

from lpnet.cli import main

sys.exit(main())
