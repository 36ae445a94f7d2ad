"""`python -m smcjax` is `smcjax`."""

import sys

from smcjax.cli.main import main

sys.exit(main())
