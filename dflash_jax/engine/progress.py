"""Progress bars: widgets in notebooks that have them, text elsewhere."""

import sys
import warnings
from typing import Any


def progress_bar(*args: Any, **options: Any) -> Any:
    """A `tqdm` of these arguments, imported on first use. Notebooks without ipywidgets get text, and no warning of it.

    Notebooks show what is written to stderr as an alarm, in red, so bars are written to stdout there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    if type(sys.stderr).__module__.startswith("ipykernel."):
        options.setdefault("file", sys.stdout)
    return tqdm(*args, **options)
