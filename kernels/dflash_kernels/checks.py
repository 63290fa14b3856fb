"""Checks of shapes that several operations share. Each raises ValueError with what was expected and what came."""

from jaxtyping import Array


def check_latent_pages(latent_pages: Array, width: int | None = None) -> None:
    """A pool of latent rows has one head: `[P, 1, p, C]`, C as `width` says where it is given."""
    if latent_pages.ndim != 4 or latent_pages.shape[1] != 1 or width not in (None, latent_pages.shape[-1]):
        raise ValueError(f"latent pages of {latent_pages.shape} are not [P, 1, p, {'C' if width is None else width}]")


def check_sequences(sequences: int, **of_each: Array | None) -> None:
    """Arrays by name that have a number for each sequence, and `page_table [B, W]`; None where a call has none."""
    given = {name: array for name, array in of_each.items() if array is not None}
    ranks = {"page_table": 2}
    if sequences < 1 or any(x.ndim != ranks.get(name, 1) or x.shape[0] != sequences for name, x in given.items()):
        came = ", ".join(f"{name} {array.shape}" for name, array in given.items())
        raise ValueError(f"{came} must start with {sequences} sequences, at least one, and only page_table has columns")


def check_of_heads(heads: int, **of_each: Array | None) -> None:
    """Arrays by name that have a number for each query head; None where a call has none."""
    for name, array in of_each.items():
        if array is not None and array.shape != (heads,):
            raise ValueError(f"{name} {array.shape} must be ({heads},), one for each query head")


def check_wide(advice: str, **arrays: Array) -> None:
    """Arrays by name whose numbers have no scale: eight bits would also round what is multiplied with them."""
    for name, array in arrays.items():
        if array.dtype.itemsize < 2:
            raise ValueError(f"{name} must be bfloat16, float16 or float32, not {array.dtype}: {advice}")
