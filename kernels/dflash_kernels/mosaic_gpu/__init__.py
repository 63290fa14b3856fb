"""The device toolkit of the Mosaic GPU kernels. Knows no op."""
