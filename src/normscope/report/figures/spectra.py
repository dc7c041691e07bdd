"""Charts of the spectra: of one token, of the blocks by depth, of the stacks."""

from collections.abc import Sequence

from normscope.probes import QUANTILES
from normscope.report.figures.charts import LINES, Curve, Picture, chart
from normscope.report.figures.layout import Layout
from normscope.report.figures.ledger import Ledger

TOKEN, SPREAD = "jacobian/token-singular-values", "jacobian/log-sigma"
SHOWN = (1.0, 0.9, 0.5, 0.1, 0.0)
"""Quantiles of log σ that have a line each by depth, the largest value first."""


def spectra(ledger: Ledger, layout: Layout) -> list[Picture]:
    """The charts of which there are figures."""
    found = [_one_token(ledger, layout), _by_depth(ledger, layout), _of_stacks(ledger, layout)]
    return [picture for picture in found if picture is not None]


def _one_token(ledger: Ledger, layout: Layout) -> Picture | None:
    """Every singular value of one token through stacks, and through some blocks where there is one stack."""
    stacks = layout.stacks
    places = {place.stack.name if len(stacks) > 1 else "stack": place.stack.name for place in stacks}
    if len(stacks) == 1:
        blocks = [place for place in stacks[0].blocks if _tuple(ledger, TOKEN, place.block.site)]
        chosen = blocks[:1] + blocks[len(blocks) // 2 :][:1] + blocks[-1:]
        places |= {f"block {place.number}": place.block.site for place in chosen}
    spectra = {name: _tuple(ledger, TOKEN, site) for name, site in places.items()}
    drawn = [
        Curve(name if len(places) > 1 else "", LINES[i % 5], [n + 1.0 for n in range(len(values))], values)
        for i, (name, values) in enumerate(item for item in spectra.items() if item[1])
    ]
    if not drawn:
        return None
    label = "Singular values of one token's Jacobian"
    about = "Singular values, largest first. A steep fall: few directions survive. A cliff: a null space."
    return Picture("One token", about, chart(drawn, label=label, x_label="index", log=True, dots=False))


def _by_depth(ledger: Ledger, layout: Layout) -> Picture | None:
    """Quantiles of the blocks' singular values, block by block, of the first stack that has them."""
    for stack in layout.stacks:
        rows = {float(place.number): _tuple(ledger, SPREAD, place.block.site) for place in stack.blocks}
        rows = {number: values for number, values in rows.items() if values}
        if len(rows) < 2:
            continue
        curves = []
        for css, share in zip(LINES, SHOWN, strict=True):
            name = {1.0: "largest", 0.0: "least", 0.5: "median"}.get(share, f"{share:.0%}")
            gains = [_gain(values[QUANTILES.index(share)]) for values in rows.values()]
            curves.append(Curve(name, css, list(rows), gains))
        about = "Quantiles of each block's singular values."
        drawing = chart(curves, label="Quantiles of the blocks' singular values", x_label="block", log=True)
        return Picture("Spectrum by depth", about, drawing)
    return None


def _of_stacks(ledger: Ledger, layout: Layout) -> Picture | None:
    """The distribution of each stack's singular values."""
    several, percent = len(layout.stacks) > 1, [100 * q for q in QUANTILES]
    curves = []
    for i, place in enumerate(layout.stacks):
        values = _tuple(ledger, SPREAD, place.stack.name)
        if values:
            name = place.stack.name if several else ""
            curves.append(Curve(name, LINES[i % 5], percent, list(map(_gain, values))))
    if not curves:
        return None
    about = "Quantiles of the stack's singular values: x % of them are at most σ."
    drawing = chart(curves, label="Distribution of the stack's singular values", x_label="%", log=True)
    return Picture("Spectrum of the stack", about, drawing)


def _tuple(ledger: Ledger, quantity: str, site: str) -> Sequence[float]:
    row = ledger.find(quantity, site)
    return row.value if row is not None and isinstance(row.value, tuple) else ()


def _gain(log: float) -> float | None:
    """σ of log₁₀ σ; none of zero, which a log axis does not have."""
    return 10.0**log if log > -300 else None
