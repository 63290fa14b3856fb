"""`python -m dflash_jax` is `dflash-jax`."""

import sys

from dflash_jax.cli import main

sys.exit(main())
