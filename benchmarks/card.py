"""Rates of the GPU that runs, which floors divide by. A peer's figure stands beside figures of its own card alone."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Card:
    """Rates that were measured on a kind of GPU.

    Attributes:
      bandwidth: bytes a second of a large device-to-device copy, read and written.
      products: bfloat16 operations a second of a large matrix product; a multiply-add counts two.
      known: measured on this kind. Floors of other devices are left out of rows.
    """

    bandwidth: float
    products: float
    known: bool = True


H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
CARDS = {H200: Card(4.3e12, 790e12), H100: Card(3.0e12, 790e12)}


def card() -> Card:
    """The card of JAX's default device. A device that is not in the table gets an H200's rates, which only size its loops."""
    return CARDS.get(jax.devices()[0].device_kind, Card(4.3e12, 790e12, known=False))


def measured_here(peer_card: str) -> bool:
    """Whether a peer's figure of `peer_card` may stand beside a figure of the device that runs."""
    return jax.devices()[0].device_kind == peer_card
