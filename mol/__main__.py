"""`python -m mol`."""

import sys

from mol.cli import main

sys.exit(main())
