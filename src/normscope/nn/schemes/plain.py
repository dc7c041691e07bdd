"""Plain sums with a norm before, after, or on the stream; Pre-LN with another function in the slots."""

from types import MappingProxyType

from normscope.nn.joins import Scaled
from normscope.nn.placement import Slot, norms_at, zero
from normscope.nn.scheme import Initialisation, Inside, Scheme

XAVIER = Initialisation("xavier")

PLAIN = Scheme(
    "plain",
    "F(x)",
    norms_at(),
    "the stack without residuals that rank collapse is about: Dong et al. 2021, arXiv:2103.03404",
    join=Scaled(stream_scale=zero),
    initialisation=XAVIER,
)
RESIDUAL_NO_NORM = Scheme(
    "residual-no-norm",
    "x + F(x)",
    norms_at(),
    "the start of Fixup: Zhang et al. 2019, arXiv:1901.09321",
    initialisation=XAVIER,
)
POST = Scheme(
    "post",
    "N(x + F(x))",
    norms_at(Slot.STREAM),
    "Vaswani et al. 2017, arXiv:1706.03762",
    initialisation=XAVIER,
)
PRE = Scheme(
    "pre",
    "x + F(N(x))",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Xiong et al. 2020, arXiv:2002.04745",
)
PRE_NO_FINAL = Scheme(
    "pre-no-final",
    "x + F(N(x)), no norm at the end",
    norms_at(Slot.BRANCH_IN),
    "torch.nn.TransformerEncoder(norm_first=True) without `norm`",
    reads_as="pre",  # an anatomy distinguishes it from Pre-LN by `final_norm`
)
GPT2 = Scheme(
    "gpt2",
    "x + F(N(x)); N(0, 0.02²), W_O and W₂ × 1/√(2L)",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Radford et al. 2019 (GPT-2)",
    initialisation=Initialisation("gpt2"),
    reads_as="pre",
)
PERI = Scheme(
    "peri",
    "x + N(F(N(x)))",
    norms_at(Slot.ENTRY, Slot.BRANCH_IN, Slot.BRANCH_OUT, Slot.FINAL),
    "Kim et al. 2025 (Peri-LN), arXiv:2502.02732, with its optional norm of the embedding; Ding et al. 2021 "
    "(Sandwich-LN), arXiv:2105.13290, without",
)
RES_POST = Scheme(
    "res-post",
    "x + N(F(x))",
    norms_at(Slot.ENTRY, Slot.BRANCH_OUT, Slot.FINAL),
    "Liu et al. 2021 (Swin v2), arXiv:2111.09883, with its norm of the patches",
)
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
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Zhu et al. 2025, arXiv:2503.10622",
    norm="dyt",
)
DERF = Scheme(
    "derf",
    "x + F(N(x)), N(x) = γ erf(ax + s) + β",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Chen et al. 2025, arXiv:2512.10938",
    norm="derf",
)
SEEDNORM = Scheme(
    "seednorm",
    "x + F(N(x)), N(x) = (γ + α tanh(x·β)) ⊙ x/√(mean x² + ε), β = 0 at the start",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Cai et al. 2025, arXiv:2510.22777, from a transcription; initial values are ours",
    norm="seednorm",
)
BHYT = Scheme(
    "bhyt",
    "x + F(N(x)), N(x) = γ tanh(λx/(κ√(mean x² + ε))), λ = 2 at the start, κ = 10",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Byun et al. 2025, arXiv:2601.09719, with exact statistics in every norm (`BHyT_Star` in their code)",
    norm="bhyt",
)
SCALENORM = Scheme(
    "scalenorm",
    "x + F(N(x)), N(x) = g x/‖x‖; weights of variance 2/(5d)",
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Nguyen and Salazar 2019, arXiv:1910.05895",
    initialisation=Initialisation("small"),
    norm="scalenorm",
)
SIGMA_REPARAM = Scheme(
    "sigma-reparam",
    'x + F(N(x)), every map of the branches (γ/σ(W)) W; norm="none" for the one without norms',
    norms_at(Slot.BRANCH_IN, Slot.FINAL),
    "Zhai et al. 2023, arXiv:2303.06296",
    inside=Inside(linear="sigma"),
)
