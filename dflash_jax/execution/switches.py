"""Switches of the fused paths, for comparisons: what is off runs as separate operations.

All of the package's stand here and nowhere else: each changes what is traced, so all of them are part of a stored program's key
(`dflash_jax.compile.executable_cache.settings`).
"""

PERSISTENT = True  # one kernel between two layers' attention
PERSISTENT_ATTENTION = True  # attention over pages in the same kernel
FUSED_DENSE = True  # GEMMs with epilogues
FUSED_QKV = True  # norm, rotation, write and attention of few tokens as one launch
HYBRID = True  # fused runners of targets with gated delta nets
HYBRID_EIGHT_BITS = True  # the same with weights in eight bits
BIASES = True  # fused runners of layers with biases of queries, keys and values
WIDE_HEADS = True  # heads wider than 256 are attended to by a kernel
COLUMN_BLOCKS = True  # matrices stored in blocks of columns
NARROW_ITEMS = True  # the tile scheduler over pages in eight bits
FOUR_BITS = True  # experts that were released in MXFP4 stay so where a kernel reads them
FEW = True  # products of a few rows with a bias in one launch
FUSED_MXFP4 = True  # fused runner of layers with such experts
NORM_PRODUCT = True  # of one token, a norm and the projection after it as one launch
NORM_HEADS = True  # the same where heads are rotated and written in that launch
TOKEN_ATTENTION = True  # of one token, all from there to the output projection as one launch
SPARSE = True  # kernels for an indexer's scores, its choice and attention to it
RANK_EXCHANGE = True  # GPUs that share a model add up in kernels of the package's own while decoding
RANK_EXCHANGE_DELTA = True  # also those of gated delta nets
RANK_EXCHANGE_SUMS = True  # also sums that are a launch of their own, of layers that run one by one


def switches() -> dict[str, bool]:
    """Every switch by name, as it is now."""
    return {name: value for name, value in globals().items() if name.isupper()}
