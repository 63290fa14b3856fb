"""`dflash-convert` as a function: `dflash_jax.convert`."""

import warnings
from pathlib import Path
from typing import Literal

from dflash_convert.console import Console
from dflash_convert.conversion import Options, run
from dflash_convert.errors import UsageError
from dflash_jax.options import as_flag


def convert(
    source: str | Path,
    output: str | Path,
    *,
    draft: str | Path | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    dtype: Literal["keep", "bfloat16", "float16", "float32"] = "keep",
    verify: Literal["none", "hash", "logits"] = "hash",
    overwrite: bool = False,
    reverse: bool = False,
    progress: bool = False,
) -> Path:
    """Converts a Hugging Face checkpoint, and its drafter, into a folder that `load` takes, as `dflash-convert` does.

    The folder appears whole or not at all. What there is to say of a checkpoint, such as tensors that nothing needs, is warned of.

    Args:
      source: a folder with config.json and safetensors files, or owner/name on the hub.
      output: the folder to write.
      draft: the drafter to convert along, a folder or owner/name on the hub.
      revision: branch, tag or commit of `source` on the hub.
      draft_revision: the same of `draft`.
      dtype: of the weights; "keep" leaves each as it is.
      verify: "hash" reads everything back and compares every bit, "logits" also runs both checkpoints.
      overwrite: replace `output` if it is a converted folder.
      reverse: `source` is a converted folder; write a Hugging Face folder.
      progress: show bars.

    Returns:
      `output`, as a path.

    Raises:
      CheckpointError, ConfigError, TokenizerError: a source cannot be used, with every reason; nothing is left of `output`. Also
        where the verification failed.
      PairError: target and drafter do not belong together.
      DFlashError: `output` is there already or cannot be written, or arguments contradict each other.
    """
    for name, flag in (("overwrite", overwrite), ("reverse", reverse), ("progress", progress)):
        if as_flag(flag) is None:
            raise UsageError(f"{name} must be True or False, got {flag!r:.80}")
    if not isinstance(output, str | Path) or not str(output):
        raise UsageError(f"output must be the path of a folder to write, got {output!r:.80}")
    try:
        output = Path(output).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{output} begins with the home of a user whom this machine does not know") from error
    console = Console(quiet=not progress, as_json=True)  # it keeps in its report what it would print
    options = Options(
        str(source), output, None if draft is None else str(draft), revision, draft_revision,
        dtype=dtype, verify=verify, overwrite=overwrite, reverse=reverse,
    )  # fmt: skip
    run(options, console)
    for part in (console.report, *(console.report.get(name, {}) for name in ("target", "draft"))):
        for notice in part.get("notices", ()):
            warnings.warn(notice, stacklevel=2)
    return output
