"""Files of prompts and answers that a user names."""

from pathlib import Path

from dflash_jax.errors import PromptError


def read_utf8(path: str | Path) -> str:
    """The text of a UTF-8 file, without the byte order mark that some editors write at its beginning.

    Raises:
      PromptError: the file cannot be read, or it is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"{path} cannot be read ({error.strerror or error}): name a file of prompts") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise PromptError(f"{path} is not UTF-8 (its byte {error.start} is 0x{byte:02x}): save it as UTF-8") from error
