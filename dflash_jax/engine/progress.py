"""Bars of progress: widgets in notebooks that have such, text elsewhere."""

import warnings
from typing import Any


def progress_bar(*args: Any, **options: Any) -> Any:
    """A `tqdm` of these arguments, imported on first use. Notebooks without ipywidgets get text, and no warning of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm(*args, **options)
