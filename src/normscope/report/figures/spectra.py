"""Charts of the spectra: of one token, of the blocks by depth, of the stacks."""

from collections.abc import Sequence

from normscope.probes import QUANTILES
from normscope.report.figures.charts import LINES, Curve, Picture, chart
from normscope.report.figures.layout import Layout
from normscope.report.figures.ledger import Ledger

SHOWN = (1.0, 0.9, 0.5, 0.1, 0.0)
"""Quantiles of log σ that have a line each by depth, the largest value first."""


def spectra(ledger: Ledger, layout: Layout) -> list[Picture]:
    """The charts of which there are figures."""
    found = [_one_token(ledger, layout), _by_depth(ledger, layout), _of_stacks(ledger, layout)]
    return [picture for picture in found if picture is not None]


def _one_token(ledger: Ledger, layout: Layout) -> Picture | None:
    """Every singular value of one token through stacks, and through some blocks where there is one stack."""
    places = [
        (stack.stack.name if len(layout.stacks) > 1 else "stack", stack.stack.name) for stack in layout.stacks
    ]
    if len(layout.stacks) == 1:
        blocks = [block for block in layout.stacks[0].blocks if _tuple(ledger, TOKEN, block.block.site)]
        ends = {0: blocks[:1], 1: blocks[len(blocks) // 2 :][:1], 2: blocks[-1:]}
        chosen = {block.number: block for some in ends.values() for block in some}
        places += [(f"block {number}", block.block.site) for number, block in chosen.items()]
    curves = [(name, _tuple(ledger, TOKEN, site)) for name, site in places]
    drawn = [
        Curve(name if len(places) > 1 else "", LINES[i % 5], [n + 1.0 for n in range(len(values))], values)
        for i, (name, values) in enumerate(curve for curve in curves if curve[1])
    ]
    if not drawn:
        return None
    label = "Singular values of one token's Jacobian"
    about = "Of its d×d Jacobian, largest first. Steep: few directions survive; a cliff: a kernel."
    return Picture("One token", about, chart(drawn, label=label, x_label="index", log=True, dots=False))


TOKEN, SPREAD = "jacobian/token-singular-values", "jacobian/log-sigma"


def _by_depth(ledger: Ledger, layout: Layout) -> Picture | None:
    """Quantiles of the blocks' singular values, block by block, of the first stack that has them."""
    for stack in layout.stacks:
        rows = [(place.number, _tuple(ledger, SPREAD, place.block.site)) for place in stack.blocks]
        rows = [row for row in rows if row[1]]
        if len(rows) < 2:
            continue
        xs = [float(number) for number, _ in rows]
        curves = [
            Curve(_share(share), LINES[i], xs, [_gain(values[QUANTILES.index(share)]) for _, values in rows])
            for i, share in enumerate(SHOWN)
        ]
        about = "How many of a block's singular values are smaller, by block."
        drawing = chart(curves, label="Quantiles of the blocks' singular values", x_label="block", log=True)
        return Picture("Spectrum by depth", about, drawing)
    return None


def _of_stacks(ledger: Ledger, layout: Layout) -> Picture | None:
    """The distribution of each stack's singular values."""
    found = [(place.stack.name, _tuple(ledger, SPREAD, place.stack.name)) for place in layout.stacks]
    curves = [
        Curve(
            name if len(found) > 1 else "",
            LINES[i % 5],
            [100 * q for q in QUANTILES],
            list(map(_gain, values)),
        )
        for i, (name, values) in enumerate(found)
        if values
    ]
    if not curves:
        return None
    about = "σ that so many percent of all do not exceed."
    drawing = chart(curves, label="Distribution of the stack's singular values", x_label="%", log=True)
    return Picture("Spectrum of the stack", about, drawing)


def _tuple(ledger: Ledger, quantity: str, site: str) -> Sequence[float]:
    row = ledger.find(quantity, site)
    return row.value if row is not None and isinstance(row.value, tuple) else ()


def _gain(log: float) -> float | None:
    """σ of log₁₀ σ; none of zero, which a log axis does not have."""
    return 10.0**log if log > -300 else None


def _share(share: float) -> str:
    return {1.0: "largest", 0.0: "least", 0.5: "median"}.get(share, f"{share:.0%}")
