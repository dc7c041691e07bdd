"""The catalogue of schemes by name. To add one, add an entry to a file in this folder and a line here."""

from collections.abc import Mapping
from types import MappingProxyType

from normscope.errors import UsageError, suggest
from normscope.nn.scheme import Scheme
from normscope.nn.schemes import (
    admin,
    block_entry,
    by_block,
    deepnorm,
    fixup,
    gates,
    hyper_connections,
    learnt,
    over_depth,
    plain,
    scaled,
    sub_ln,
    two_streams,
)

_TABLE: tuple[Scheme, ...] = (
    plain.PLAIN,
    plain.RESIDUAL_NO_NORM,
    plain.POST,
    plain.PRE,
    plain.PRE_NO_FINAL,
    plain.GPT2,
    plain.PERI,
    plain.RES_POST,
    plain.SWIN_V2,
    plain.OLMO2,
    deepnorm.DEEPNORM,
    sub_ln.SUB_LN,
    by_block.NORMFORMER,
    admin.ADMIN,
    learnt.REZERO,
    learnt.SKIPINIT,
    fixup.FIXUP,
    fixup.T_FIXUP,
    learnt.LAYERSCALE,
    two_streams.RESIDUAL_DUAL,
    block_entry.B2T,
    by_block.MIX_LN,
    scaled.LAYERNORM_SCALING,
    learnt.GPAS,
    by_block.HYBRIDNORM,
    by_block.KEEL,
    two_streams.SIAMESENORM,
    block_entry.PARALLEL,
    gates.GTRXL,
    gates.HIGHWAY,
    hyper_connections.HYPER_CONNECTIONS,
    hyper_connections.MHC,
    hyper_connections.MHC_LITE,
    hyper_connections.KROMHC,
    over_depth.ATTNRES,
    over_depth.BLOCK_ATTNRES,
    over_depth.NANOCHAT,
    learnt.NGPT,
    plain.DYT,
    plain.DERF,
    plain.SEEDNORM,
    plain.BHYT,
    plain.SCALENORM,
    plain.SIGMA_REPARAM,
    scaled.DEPTH_MUP,
    scaled.UNIT_SCALING,
    scaled.DSLM,
)

SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in _TABLE})
"""Every scheme by its name."""


def scheme_named(name: str) -> Scheme:
    """The scheme called `name`; UsageError with the nearest name if it is unknown."""
    if name not in SCHEMES:
        known = f"one of the {len(SCHEMES)} that `normscope schemes` lists"
        raise UsageError(f'scheme "{name}"', known, suggest(name, SCHEMES, "choose one of them"))
    return SCHEMES[name]
