"""`python -m dflash_convert` is `dflash-convert`."""

from dflash_convert.command import main

main()
