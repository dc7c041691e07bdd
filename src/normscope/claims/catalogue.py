"""The schemes that claims about the whole catalogue were measured on."""

from collections.abc import Mapping
from types import MappingProxyType

from normscope.nn import SCHEMES as CATALOGUE
from normscope.nn import Scheme

LATER = frozenset({"seednorm", "bhyt", "mhc-lite", "kromhc", "attnres", "block-attnres", "nanochat"})
"""Schemes added since; take a name out to measure the claims on it, and say so in docs/claims.md."""

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {name: scheme for name, scheme in CATALOGUE.items() if name not in LATER}
)
