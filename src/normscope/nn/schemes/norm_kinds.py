"""Pre-LN with another function in the slots, and res-post as two families of models use it."""

from types import MappingProxyType

from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Initialisation, Inside, Scheme

PRE_SLOTS = norms_at(Slot.BRANCH_IN, Slot.FINAL)

SWIN_V2 = Scheme(
    "swin-v2",
    "x + N(F(x)), γ = 0 at the start; cosine attention",
    norms_at(Slot.ENTRY, Slot.BRANCH_OUT, Slot.FINAL),
    "Liu et al. 2021, arXiv:2111.09883; γ = 0 and the norm of the patches as in timm",
    initialisation=Initialisation("normal", norms=MappingProxyType({Slot.BRANCH_OUT: 0.0})),
    inside=Inside(qk_norm="cosine"),
)
OLMO2 = Scheme(
    "olmo2",
    "x + N(F(x)), N an RMSNorm, with norms on all of q and of k",
    norms_at(Slot.BRANCH_OUT, Slot.FINAL),
    "OLMo team 2025, arXiv:2501.00656; embeddings N(0, 0.02²) without a norm, as in their code",
    inside=Inside(qk_norm="full"),
    norm="rmsnorm",
)
DYT = Scheme(
    "dyt",
    "x + F(N(x)), N(x) = γ tanh(ax) + β",
    PRE_SLOTS,
    "Zhu et al. 2025, arXiv:2503.10622",
    norm="dyt",
)
DERF = Scheme(
    "derf",
    "x + F(N(x)), N(x) = γ erf(ax + s) + β",
    PRE_SLOTS,
    "Chen et al. 2025, arXiv:2512.10938",
    norm="derf",
)
SCALENORM = Scheme(
    "scalenorm",
    "x + F(N(x)), N(x) = g x/‖x‖; weights of variance 2/(5d)",
    PRE_SLOTS,
    "Nguyen and Salazar 2019, arXiv:1910.05895",
    initialisation=Initialisation("small"),
    norm="scalenorm",
)
SIGMA_REPARAM = Scheme(
    "sigma-reparam",
    'x + F(N(x)), every map of the branches (γ/σ(W)) W; norm="none" for the one without norms',
    PRE_SLOTS,
    "Zhai et al. 2023, arXiv:2303.06296",
    inside=Inside(linear="sigma"),
)
