"""Calls of the `tokenizers` library, whose errors are bare exceptions or, where its Rust panics, no `Exception` at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from dflash_jax.checkpoints.hub import POINTER, is_pointer
from dflash_jax.checkpoints.json_files import MAX_JSON_BYTES
from dflash_jax.errors import DFlashError, TokenizerError


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Makes a TokenizerError that begins with `what` of whatever the library raises inside."""
    try:
        yield
    except DFlashError:
        raise
    except BaseException as error:
        # The class of PyO3 cannot be imported. What ends programs, KeyboardInterrupt for one, passes.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: {str(error) or type(error).__name__}") from error


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
      TokenizerError: the file cannot be used.
    """
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise TokenizerError(
                f"{path} has {size:,} bytes, at most {MAX_JSON_BYTES:,} are permitted; fetch the file again"
            )
        if is_pointer(path):
            raise TokenizerError(f"{path} {POINTER}")
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read ({error.strerror or error}); fetch the file again") from error
    with named_errors(f"{path} is not a tokenizer this version of tokenizers can read"):
        return tokenizers.Tokenizer.from_file(str(path))
