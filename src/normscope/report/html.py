"""The HTML page: one self-contained file that reads without a network and without JavaScript."""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from normscope.anatomy import Stack
from normscope.forecast import Forecast
from normscope.report.figures.branches import draw_key, form
from normscope.report.figures.deciding import deciding
from normscope.report.figures.fold import fold_layout, folds_of
from normscope.report.figures.layout import BlockPlace, Layout, StackPlace, lay_out
from normscope.report.figures.ledger import Ledger
from normscope.report.figures.rail import Spot, draw_rail, marks, place_findings
from normscope.report.figures.spectra import spectra
from normscope.report.figures.tower import draw_towers
from normscope.report.figures.tracks import Track, draw_tracks
from normscope.report.figures.trial import forecast_charts, ladder_charts, single_looks
from normscope.report.page import environment, style_sheet
from normscope.report.rescue import (
    REACHES,
    ladder_sentences,
    last_figures,
    named,
    outcome_class,
    probability,
    rate_to_use,
    rates_at_scale,
    remedies_legend,
    status_in_words,
    steps_taken,
    way_out,
)
from normscope.report.sites import compress, number_runs
from normscope.report.tables import cell, not_measured, number_sheets, tabulate
from normscope.report.words import (
    budget_in_words,
    certainty_in_words,
    headline,
    norms_in_words,
    risk_in_words,
    too_early_in_words,
)
from normscope.rules.remedies import REMEDIES
from normscope.train import recipe_in_words
from normscope.train.optim import TITLES

CARD_CHARACTERS = 44
"""Approximate number of characters in a line of a finding's card beside the tower."""
_CLASSES = {"will fail": "error", "at risk": "warning", "no trial": "untried", "interrupted": "halted"}


def render_html(report: Any, command: str | None = None) -> str:
    """The page of a `Report`.

    Args:
        report: a `normscope.report.Report`.
        command: shell command that made the report, shown as the way to run it again.

    Returns:
        A whole HTML document, under a megabyte for a hundred blocks. The same report gives the same text.
        Every name in it is escaped, and its content security policy lets no script run but its own.
    """
    trial, ladder, remedies = report.forecast, report.ladder, report.remedies
    said = headline(report.verdict, trial, ladder)
    ledger = Ledger(report.measurements, trial.curve[-1] if trial and trial.curve else None)
    full = lay_out(report.anatomy)
    layout = fold_layout(report.anatomy) or full
    spots = place_findings(report.findings, layout)
    flags = marks(spots)
    folds = [] if layout is full else [folds_of(stack, ledger, flags) for stack in layout.stacks]
    tower, tower_width = draw_towers(layout, ledger, flags, folds)
    width = _track_width(spots, tower_width)
    charts = forecast_charts(trial, layout) if trial else []
    decides, charts = deciding(report, charts, layout, ledger)
    script = style_sheet("page.js")
    template = environment("normscope.report").get_template("page.html")
    page = template.render(
        report=report,
        verdict=_CLASSES.get(report.verdict, "fine" if said == report.verdict else "untried"),
        headline=said,
        lead=lead_sentence(report),
        style=Markup(style_sheet("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        structure=[(stack.name, describe_stack(stack)) for stack in report.anatomy.stacks],
        tower=tower if layout.stacks else "",
        stacks=layout.stacks,
        views=_views(layout, full, ledger, spots, tower, width),
        folds=[
            (stack.stack.name if len(layout.stacks) > 1 else "", fold.words)
            for stack, each in zip(layout.stacks, folds, strict=False)
            for fold in each
        ],
        decides=decides,
        cards=_cards(spots, layout),
        by_number=spots,
        keys=_keys(layout),
        forecasts=charts,
        ladder_charts=ladder_charts(ladder) if ladder else [],
        rate_to_use=rate_to_use(ladder) if ladder else "",
        rates_at_scale=rates_at_scale(ladder) if ladder else "",
        ladder_words=" ".join(map(sentence, ladder_sentences(trial, ladder))) if ladder else "",
        way_out=way_out(remedies.best) if remedies and remedies.best else "",
        known_remedies=REMEDIES,
        reaches=REACHES,
        last_figures=last_figures,
        named=named,
        probability=probability,
        remedies_legend=remedies_legend,
        status_in_words=status_in_words,
        steps_taken=steps_taken,
        outcome_class=outcome_class,
        certainty_in_words=certainty_in_words,
        risk_in_words=risk_in_words,
        too_early=too_early_in_words(trial, ladder) if trial else "",
        looks=single_looks(trial) if trial else [],
        spectra=spectra(ledger, layout),
        numbers=number_sheets(report.anatomy, ledger.rows),
        tables=tabulate(report.anatomy, ledger.rows),
        gaps=not_measured(ledger.rows, report.budget),
        cost=_cost(report.cost),
        budget=budget_in_words(report.budget, left_out=False) if report.budget else "",
        total=report.cost.get("total"),
        rerun=command or "",
        recipe=recipe_in_words(report.recipe) if report.recipe else "",
        trial_facts=_trial_facts(trial) if trial else "",
        cell=cell,
        trial=ledger.trial,
        sentence=sentence,
    )
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True)
class _View:
    """The tower with its profiles on one depth axis."""

    tower: Markup
    tracks: list[Track]
    rail: Markup | str


def _views(
    layout: Layout, full: Layout, ledger: Ledger, spots: Sequence[Spot], tower: Markup, width: float
) -> list[_View]:
    """The folded view, and the one with every block where that is another; none without a stack."""
    if not layout.stacks:
        return []
    views = [_View(tower, draw_tracks(layout, ledger, width), _rail(spots, layout))]
    if full is not layout:
        placed = place_findings([spot.finding for spot in spots], full)
        every, _ = draw_towers(full, ledger, marks(placed))
        views.append(_View(every, draw_tracks(full, ledger, width), _rail(placed, full)))
    return views


def _rail(spots: Sequence[Spot], layout: Layout) -> Markup | str:
    return draw_rail(spots, layout) if any(spot.places for spot in spots) else ""


def lead_sentence(report: Any) -> str:
    """The one sentence that matters: the worst finding's, or for a healthy model the forecast's."""
    for severity in ("error", "warning"):
        for finding in report.findings:
            if str(finding.severity) == severity:
                return sentence(finding.message)
    if report.verdict == "interrupted":
        return "The check was interrupted. The measurements made until then show nothing above a note."
    if report.verdict == "no trial":
        reason = "no trial was asked for" if report.forecast is None else report.forecast.reason
        return (
            f"No training step was tried: {reason.rstrip('.')}. The measurements show nothing above a note."
        )
    if report.forecast is not None and report.forecast.outcome != "not measured":
        return sentence(report.forecast.reason)
    return "The measurements show nothing above a note."


def sentence(words: str) -> str:
    """`words` with a capital letter, unless they start with a path or a symbol, and a full stop.

    An optimiser at the start gets its usual name: "adamw at 0.001" becomes "AdamW at 0.001".
    """
    first = words.split(" ", 1)[0].rstrip(",:")
    capital = first[:1].upper() + first[1:] if first.isascii() and first.isalpha() else first
    return TITLES.get(first, capital) + words[len(first) :] + ("" if words[-1:] in ".!?" else ".")


def describe_stack(stack: Stack) -> str:
    """A stack in one line: "12 blocks of attention and feed-forward, pre (layernorm), with a final norm"."""
    kinds = list(dict.fromkeys(b.kind for b in stack.branches))
    norms = norms_in_words(stack)
    if norms and not any(b.scheme for b in stack.branches):
        norms = f"norm placement {norms}"
    made = f"{len(stack.blocks)} block{'s' if len(stack.blocks) != 1 else ''}"
    made += "" if stack.complete else " and a part that was not read"
    if kinds:
        made += " of " + " and ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
    ending = "without a final norm" if stack.complete else "no final norm was read"
    if stack.final_norm is not None:
        ending = "with a final norm"
    return ", ".join(filter(None, [made, norms, ending]))


def _track_width(spots: Sequence[Spot], tower_width: float) -> float:
    """Eight profiles, the tower and the findings (where there are any) fill a page of about 1200 pixels."""
    room = 1216 - tower_width - 8 * 7 - (330 if spots else 0)
    return float(max(64, min(116, math.floor(room / 8))))


def _cards(spots: Sequence[Spot], layout: Layout) -> list[tuple[Spot, str, int]]:
    """(finding, its place in words, space above) from the top of the page down, each card near its blocks.

    A place is the blocks that a finding speaks of, or its sites' own names where none is in a block.
    """
    cards, cursor = [], 0.0
    for spot in sorted(spots, key=lambda s: (bool(s.places), s.top if s.places else 0.0, s.number)):
        start = max(cursor, spot.top) if spot.places else cursor
        where = _block_numbers(spot.places, layout) or compress(spot.finding.sites) or "whole model"
        cards.append((spot, where, round(start - cursor)))
        cursor = start + 96 + 18 * math.ceil(len(spot.finding.message) / CARD_CHARACTERS)
    return cards


def _block_numbers(places: Sequence[tuple[StackPlace, BlockPlace]], layout: Layout) -> str:
    """ "blocks 0–3, 7"; with the stacks' names where there are several."""
    parts = []
    for stack in layout.stacks:
        numbers = [block.number for place, block in places if place is stack]
        if numbers:
            name = f"{stack.stack.name} " if len(layout.stacks) > 1 else ""
            parts.append(f"{name}block{'s' if len(numbers) > 1 else ''} {number_runs(numbers)}")
    return ", ".join(parts)


def _keys(layout: Layout) -> list[tuple[str, Markup]]:
    """The distinct kinds of block, each with its place."""
    kinds: dict[tuple, list[tuple[StackPlace, BlockPlace]]] = {}
    for stack in layout.stacks:
        for place in stack.blocks:
            kinds.setdefault(form(place.block), []).append((stack, place))
    return [
        (f"{len(members)} × · {_block_numbers(members, layout)}", draw_key(members[0][1].block))
        for members in kinds.values()
    ]


def _trial_facts(trial: Forecast) -> str:
    """The trial's settings and outcome: "20 steps of AdamW at 0.0003, warm-up 10: trains"."""
    warmup = f", warm-up {trial.warmup}" if trial.warmup else ""
    name = TITLES.get(trial.optimizer, trial.optimizer)
    return f"{trial.steps} steps of {name} at {trial.lr:g}{warmup}: {trial.outcome}"


def _cost(cost: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(probe, seconds, share of the largest in percent), dearest first."""
    parts = {name: seconds for name, seconds in cost.items() if name != "total"}
    largest = max(parts.values(), default=0.0) or 1.0
    return [(name, s, round(100 * s / largest, 1)) for name, s in sorted(parts.items(), key=lambda c: -c[1])]
