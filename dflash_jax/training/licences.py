"""Is an installed distribution permissively licensed? Decided from its metadata alone; unknown means no."""

import re
from importlib.metadata import Distribution

_PERMISSIVE = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "HPND", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0",
    "Python-2.0", "Unlicense", "Zlib",
}  # fmt: skip

# What stands in `License` or behind `License :: OSI Approved ::` of older metadata, in lower case.
_NAMES = {
    "apache software license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "bsd license": "BSD",
    "bsd": "BSD",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "2-clause bsd": "BSD-2-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit": "MIT",
    "mit license": "MIT",
    "python software foundation license": "PSF-2.0",
}


def permissive_licence(distribution: Distribution) -> str | None:
    """The licence's name if every part of it is permissive, otherwise None.

    An SPDX `License-Expression` decides alone; otherwise every licence classifier must be known; otherwise the `License` field.
    """
    meta = distribution.metadata
    if expression := meta.get("License-Expression"):
        parts = [part for part in re.split(r"[\s()]+|\bAND\b|\bOR\b", expression) if part]
        return expression if parts and all(part in _PERMISSIVE for part in parts) else None
    classifiers = [line.split(" :: ")[-1] for line in meta.get_all("Classifier") or [] if line.startswith("License ::")]
    classifiers = [name for name in classifiers if name != "OSI Approved"]
    if not classifiers and meta.get("License"):
        classifiers = [meta["License"].strip()]
    names = [_NAMES.get(name.lower(), "") for name in classifiers]
    return " AND ".join(dict.fromkeys(names)) if names and all(names) else None
