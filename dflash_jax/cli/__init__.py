"""The command `dflash-jax`."""
