"""`python -m wide` is the command `wide`."""

import sys

from wide.cli.entry import main

sys.exit(main())
