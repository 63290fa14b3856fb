"""Floors and peers are of the card that ran, or absent."""

import json
from types import SimpleNamespace

import jax
import pytest


@pytest.fixture
def recorded(script, monkeypatch, tmp_path):
    """The row that a card of a kind gets for one figure with a floor and a peer of an H200."""

    def row(kind: str) -> dict:
        record, card = script("record"), script("card")
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
        kept = record.Record("one", SimpleNamespace(out=tmp_path, commit="abc"))
        kept.add("step", "time", 2.0, "ms", floor=1.0, peer="other", peer_value=3.0, peer_card=card.H200)
        return json.loads((tmp_path / "one.json").read_text())[0]

    return row


@pytest.mark.parametrize(
    ("kind", "floor", "peer"),
    [("NVIDIA H200", 1.0, 3.0), ("NVIDIA H100 80GB HBM3", 1.0, None), ("NVIDIA Unheard-Of", None, None)],
)
def test_rows_hold_what_is_of_their_card(recorded, kind, floor, peer):
    row = recorded(kind)
    assert (row["device"], row["floor"], row["peer_value"]) == (kind, floor, peer)
    assert (row["peer"] is None) == (peer is None)


def test_rates_differ_by_card(script, monkeypatch):
    card = script("card")
    rates = {}
    for kind in (card.H200, card.H100):
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [SimpleNamespace(device_kind=kind)])
        rates[kind] = card.card().bandwidth
        assert card.measured_here(kind)
    assert rates == {card.H200: 4.3e12, card.H100: 3.0e12}


def test_no_peer_of_another_card_stands_in_the_results(script):
    """Every peer that says where it was measured was measured on the row's own kind of card."""
    record = script("record")
    for path in record.RESULTS.glob("*.json"):
        for row in json.loads(path.read_text(encoding="utf-8")):
            if row["peer"] and "on an H200" in row["peer"]:
                assert row["device"] == "NVIDIA H200", (path.name, row["case"])
