"""`python -m wide` is the command `wide`."""

import sys

from wide.cli.main import main

sys.exit(main())
