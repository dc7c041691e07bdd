"""NS5xx: findings about half precision, and about values that are not finite."""

from collections.abc import Iterator

from normscope.probes.measurement import EXACT
from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, note_or_warning, rule

HEADROOM_BITS = 3.0
"""Bits between the largest activation and float16's 65504; training makes activations grow several times."""
FLUSHED = 0.05
"""Share of the non-zero gradient values that float16 turns into zero."""
COSINE = 0.9
"""Cosine between the float32 gradient and the one under bfloat16 autocast."""
TINY_EPS = 2.0**-25
"""Half of float16's smallest subnormal: an ε up to here is zero in float16."""
LARGE_EPS = 1.0
"""ε over the median variance it guards, above which the output of a norm keeps the input's scale."""
DROWNED = 100.0
"""The same ratio for a warning, where half of the norms exceed it: they only divide by √ε."""


def _in(case: Case, dtype: str) -> Severity:
    """A note, or a warning where the model really runs in `dtype`."""
    return note_or_warning(case.dtype.removeprefix("torch.") == dtype)


@rule(
    "NS501",
    summary="Activations come close to float16's largest number, or pass it.",
    why="""Float16 ends at 65504; what is larger becomes inf, and inf − inf in the next norm becomes NaN.
        Squares (a variance computed in float16) overflow from 256 on. Outlier features grow during training,
        so a run needs headroom at the start.""",
    threshold=f"""Headroom log2(65504 / largest activation) under {HEADROOM_BITS:g} bits: a note, or a warning
        where the model runs in float16; under 0 bits: a warning in any precision, an error in float16.""",
    source="IEEE 754 binary16; Micikevicius et al. 2018, arXiv:1710.03740.",
    remedy="""Train in bfloat16, which has float32's range; or keep the residual stream and the norms in
        float32, and bring embedding scale and output projections down.""",
    remedies=("branch-scale",),
)
def float16_overflow(case: Case) -> Iterator[Hit]:
    bits = case.finite("precision/float16-headroom")
    if not bits or min(bits.values()) >= HEADROOM_BITS:
        return
    least = min(bits.values())
    severity = _in(case, "float16")
    if least < 0:
        severity = Severity.ERROR if severity is Severity.WARNING else Severity.WARNING
    sites = case.in_depth(site for site, value in bits.items() if site and value < HEADROOM_BITS)
    message = (
        f"The largest activation is {figure(65504 / 2**least)}: {figure(least)} bits from float16's limit."
    )
    yield Hit(severity, sites, message, case.rows(bits, "precision/float16-headroom"))


@rule(
    "NS502",
    summary="A large share of the gradient would be flushed to zero in float16.",
    why="""Float16 has no number between 0 and 2^-24 ≈ 6e-8. Gradients are small because the loss is a mean
        over tokens; smaller values become zero in the backward pass unless the loss is scaled up first.""",
    threshold=f"""More than {FLUSHED:g} of the non-zero gradient values rounded to zero (up to 2^-25): a note,
        a warning where the model runs in float16.""",
    source="Micikevicius et al. 2018 (loss scaling), arXiv:1710.03740.",
    remedy="Use torch.amp.GradScaler (dynamic loss scaling), or train in bfloat16.",
)
def float16_underflow(case: Case) -> Iterator[Hit]:
    shares = case.finite("precision/float16-flushed")
    if (total := shares.get("", 0.0)) <= FLUSHED:
        return
    sites = case.in_depth(site for site, value in shares.items() if site and value > FLUSHED)
    message = f"{figure(100 * total)} % of the gradient's values lie under float16's smallest number."
    rows = case.rows(("", *sites), "precision/float16-flushed")
    yield Hit(_in(case, "float16"), sites, message, rows)


@rule(
    "NS503",
    summary="The gradient under bfloat16 points elsewhere than the one in float32.",
    why="""Bfloat16 keeps 8 significant bits. Where large terms nearly cancel (collapsed tokens, a norm of a
        nearly constant vector, saturated attention) the rounding is as large as the difference, and the step
        goes into a random direction. The cosine between both gradients says how much of the step is left.""",
    threshold=f"""Cosine over all parameters under {COSINE:g}: a note, a warning where the model runs in
        bfloat16.""",
    source="Kalamkar et al. 2019, arXiv:1905.12322; the figures in docs/thresholds.md.",
    remedy="""Keep weights, norms, softmax and the residual stream in float32 under autocast; look for the
        block with the lowest cosine and for a collapse (NS202) above it.""",
    remedies=("norms-float32",),
)
def bfloat16_direction(case: Case) -> Iterator[Hit]:
    cosines = case.finite("precision/bfloat16-cosine")
    if (total := cosines.get("", 1.0)) >= COSINE:
        return
    sites = case.in_depth(site for site, value in cosines.items() if site and value < COSINE)
    message = f"The gradients in bfloat16 and float32 have cosine {figure(total)}."
    rows = case.rows(("", *sites), "precision/bfloat16-cosine")
    yield Hit(_in(case, "bfloat16"), sites, message, rows)


@rule(
    "NS504",
    summary="A norm's ε is zero in float16, so it does not guard against a division by zero there.",
    why="""A norm divides by √(var + ε). An ε up to 2^-25 ≈ 3e-8 rounds to zero in float16, and a constant
        vector (padding, a zero embedding) then gives 0/0. In float32 and bfloat16 such an ε is harmless.""",
    threshold="""ε up to 2^-25: a note (BERT's 1e-12 is one), a warning where the model runs in float16. ε = 0
        counts.""",
    source="IEEE 754 binary16; BERT's configuration, layer_norm_eps = 1e-12.",
    remedy="Use ε = 1e-5 (1e-6 for RMSNorm), or keep the norms in float32.",
    remedies=("norm-eps", "norms-float32"),
)
def eps_small(case: Case) -> Iterator[Hit]:
    eps = case.finite("precision/eps")
    sites = case.in_depth(site for site, value in eps.items() if 0 <= value <= TINY_EPS)
    if sites:
        least = figure(min(eps[site] for site in sites))
        message = f"{len(sites)} of {len(eps)} norms have an ε that float16 rounds to zero ({least})."
        yield Hit(_in(case, "float16"), sites, message, case.rows(sites, "precision/eps"))


@rule(
    "NS505",
    summary="A norm's ε outweighs the variance it guards, so the norm does not normalise.",
    why="""With var ≪ ε the norm is a division by the constant √ε: the output keeps the input's scale, and the
        direction ẑ that its Jacobian should erase passes with gain ε/(var + ε)^{3/2}, others with 1/√(var +
        ε). The branch's input then lacks the unit size that the design expects from a norm.""",
    threshold=f"""ε over the median variance (mean square for RMSNorm) of the tokens above {LARGE_EPS:g}: a
        note; above {DROWNED:g} in half of the norms or more: a warning.""",
    source="The closed form of the norm's Jacobian; the figures in docs/thresholds.md.",
    remedy="Lower ε (1e-6), or scale the norm's input up: larger embeddings, larger branch outputs.",
    remedies=("norm-eps",),
)
def eps_large(case: Case) -> Iterator[Hit]:
    ratios = case.finite("precision/eps-ratio-median")
    sites = case.in_depth(site for site, value in ratios.items() if value > LARGE_EPS)
    if sites:
        most = figure(max(ratios[site] for site in sites))
        message = f"In {len(sites)} of {len(ratios)} norms ε outweighs the variance, up to {most} times."
        grave = 2 * sum(value > DROWNED for value in ratios.values()) >= len(ratios)
        rows = case.rows(sites, "precision/eps-ratio-median")
        yield Hit(note_or_warning(grave), sites, message, rows)


@rule(
    "NS506",
    summary="A value is NaN or infinite.",
    why="""A NaN reaches everything downstream of it: all later blocks within one forward, all earlier ones
        within one backward, every parameter within one step. So only the first such value in forward order
        points to the cause.""",
    threshold="Any weight, activation, loss or gradient that is not finite.",
    source="Exact, no threshold.",
    remedy="""Look at the named module: its weights (a broken checkpoint, an uninitialised torch.empty), an
        overflow in half precision (NS501), a division by a zero deviation (NS504), a fully masked row of
        attention.""",
)
def non_finite(case: Case) -> Iterator[Hit]:
    for row in case.table:
        if row.quantity == "precision/non-finite" and row.value:
            words = row.how.removeprefix(EXACT).removeprefix("; ")
            message = f"The first value that is not finite is at {row.site or 'the model itself'}"
            yield Hit(
                Severity.ERROR, (row.site,) if row.site else (), f"{message}: {words or 'NaN'}.", (row,)
            )
            return
