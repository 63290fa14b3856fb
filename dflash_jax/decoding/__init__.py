"""Decoding on the device: prefill, the cycle (draft, verify, accept, commit) and the loop around it."""
