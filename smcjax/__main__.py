"""`python -m smcjax` is `smcjax`."""

import sys

from smcjax.cli.process import main

sys.exit(main())
