"""Errors of conversions beside those of their sources (`dflash_jax.errors`)."""

from dflash_jax.errors import CheckpointError, DFlashError


class UsageError(DFlashError):
    """The arguments contradict each other."""


class OutputError(DFlashError):
    """The output cannot be written: the place does not take it, or has no room for it."""


class OutputExistsError(OutputError):
    """The output is already there and may not be replaced."""


class VerificationError(CheckpointError):
    """The converted folder is not what its source is."""
