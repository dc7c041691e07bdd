"""Two tables for every rule, one just beyond its threshold and one just inside: `PAIRS[code]`."""

import math
from dataclasses import dataclass, replace
from typing import Any

from normscope.anatomy import Anatomy, Block, Branch, Norm, Site, Stack
from normscope.forecast import Forecast, ForecastStep
from normscope.probes import Measurement, Measurements, not_measured
from normscope.probes.attention import ONE_KEY
from normscope.rules import (
    Case,
    Severity,
    gradient,
    jacobian,
    precision,
    signal,
    structure,
    wiring_flow,
    wiring_learning,
    wiring_loss,
    wiring_recipe,
    wiring_start,
)

SITE = Site("", 0, "aten.add.Tensor", 0)
FINAL = Norm("layernorm", "norm", SITE, SITE, 1e-5, "norm.weight")
OVER, UNDER = 1.01, 0.99
E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE


def branch(path: str, kind: str = "attention", placement: str = "pre", **more: Any) -> Branch:
    fields = {"norm": "layernorm", "call": 0, "join": "add", "stream_scale": None, "branch_scale": None}
    fields |= {"scheme": None, "entry": SITE, "output": SITE, "sum": SITE} | more
    return Branch(kind=kind, placement=placement, path=path, **fields)  # type: ignore[arg-type]


def block(path: str, placement: str = "pre", **more: Any) -> Block:
    attention = branch(f"{path}.attn", "attention", placement, **more)
    return Block(path, 0, (attention, branch(f"{path}.mlp", "feed-forward", placement, **more)), SITE, SITE)


def anatomy(depth: int = 12, placement: str = "pre", final: bool = True, **more: Any) -> Anatomy:
    blocks = tuple(block(f"layers.{i}", placement, **more) for i in range(depth))
    return Anatomy((Stack("layers", blocks, FINAL if final else None, SITE),))


READING = anatomy()


def read_by(reader: Any) -> Anatomy:
    """A Pre-LN stack without a final norm whose stream this reads."""
    return Anatomy(tuple(replace(stack, read_by=reader) for stack in anatomy(final=False).stacks))


def ending(rms: float, start: float = 0.02) -> Case:
    """A Pre-LN stack without a final norm whose input and last state have this RMS."""
    reading = anatomy(final=False)
    ends = ("stream/rms", "layers.input", start), ("stream/rms", reading.blocks[-1].site, rms)
    return case(*ends, reading=reading)


def partly(reading: Anatomy) -> Anatomy:
    """`reading` with a part that was not read."""
    return Anatomy(tuple(replace(stack, complete=False) for stack in reading.stacks), reading.unread)


def case(
    *figures: tuple[str, str, float],
    reading: Anatomy = READING,
    forecast: Forecast | None = None,
    dtype: str = "float32",
) -> Case:
    table = Measurements(Measurement(quantity, site, value) for quantity, site, value in figures)
    return Case(reading, table, forecast, dtype)


def trial(outcome: str, **more: Any) -> Forecast:
    curve = (
        ForecastStep(0, None, 5.5, {"layers": 0.9}),
        ForecastStep(20, 3.3, 3.3, {"layers": 9e-10}, coherence=0.01, update_ratio=0.1),
    )
    made = Forecast("trains", "its reason", "adam", 1e-3, 0, 20, 3.31, curve)
    return replace(made, outcome=outcome, **more)


@dataclass(frozen=True)
class Pair:
    """Two cases: `beyond` raises the finding with this severity, `inside` does not raise it."""

    what: str
    severity: Severity
    beyond: Case
    inside: Case


def everywhere(quantity: str, value: float, count: int = 12) -> list[tuple[str, str, float]]:
    return [(quantity, f"layers.{i}.attn", value) for i in range(count)]


def half_depth(factor: float) -> Case:
    return case(("stream/rms", "layers.5", 2.0), ("stream/rms", "layers.11", 2.0 * factor))


def ends(first: float, last: float = 1.0, rms: float = 2.0) -> Case:
    figures = [("gradient/stream", "layers.0", first), ("gradient/stream", "layers.11", last)]
    return case(*figures, ("stream/rms", "layers.0", rms), ("stream/rms", "layers.11", rms))


def partly_read(given: Case) -> Case:
    """The same where the stacks were not read as a whole."""
    return replace(given, anatomy=partly(given.anatomy))


def starved(ratio: float, count: int = 12) -> Case:
    figures = [("gradient/v", f"layers.{i}.attn", 3.0) for i in range(12)]
    for role in "qk":
        figures += [
            (f"gradient/{role}", f"layers.{i}.attn", 3.0 * (ratio if i < count else 1)) for i in range(12)
        ]
    return case(*figures)


def with_one_key(starving: Case) -> Case:
    """The same where no query of any attention sees two keys."""
    rows = [not_measured("attention/entropy", f"layers.{i}.attn", ONE_KEY) for i in range(12)]
    return replace(starving, table=Measurements([*starving.table, *rows]))


def with_freed(starving: Case, num: int = 24) -> Case:
    """The same where so many weights get a gradient once tensors of zeros have left zero."""
    row = Measurement("wiring/num-freed", "", float(num))
    return replace(starving, table=Measurements([*starving.table, row]))


def starved_queries() -> Case:
    shares = (("q", 0.1 * gradient.STARVED), ("k", 0.1), ("v", 1.0))
    return case(
        *((f"gradient/{role}", f"layers.{i}.attn", share) for role, share in shares for i in range(12))
    )


def declining(below: float, above: float) -> Case:
    figures = [("branch/update-ratio", f"layers.{i}.attn", below if i < 6 else above) for i in range(12)]
    return case(*figures)


def gain(decades: float, faintest: float = 1.0) -> Case:
    rms = [("stream/faintest-token", "layers.input", faintest)]
    rms += [("stream/rms", "layers.input", 0.02), ("stream/rms", "layers.11", 2.0)]
    return case(("jacobian/contraction", "layers", decades + 2.0), *rms)  # the stream itself grows 10² times


def dead(trainable: float, count: int = 1) -> Case:
    sites = [f"layers.{i}.{name}" for i in range(12) for name in ("attn", "mlp")][:count]
    return case(
        *(row for s in sites for row in (("branch/zero-output", s, 1.0), ("branch/trainable", s, trainable)))
    )


def headroom(bits: float, dtype: str = "float32") -> Case:
    quantity = "precision/float16-headroom"
    return case((quantity, "", bits), (quantity, "layers.7", bits), dtype=dtype)


def share(quantity: str, value: float, dtype: str = "float32") -> Case:
    return case((quantity, "", value), (quantity, "layers.3", value), dtype=dtype)


def norms(quantity: str, value: float, count: int = 12, dtype: str = "float32") -> Case:
    return case(
        *((quantity, f"layers.{i}.norm", value if i < count else 1e-5) for i in range(12)), dtype=dtype
    )


def copies(value: float) -> Case:
    return case(*(("weights/identical", f"layers.{i}", value) for i in range(1, 12)))


def tried(found: Case, outcome: str, certainty: float | None) -> Case:
    return replace(found, forecast=trial(outcome, certainty=certainty))


def updates(depth: int, ratio: float) -> Case:
    figures = [("branch/update-ratio", f"layers.{i}.attn", ratio) for i in range(depth)]
    return case(*figures, reading=anatomy(depth, "post"))


def wired(site: str = "", how: str = "exact", **figures: float) -> Case:
    """Rows `wiring/…` at "" and, for names that begin with "at_", at `site`."""
    table = [
        Measurement(
            f"wiring/{name.removeprefix('at_').replace('_', '-')}",
            site if name.startswith("at_") else "",
            value,
            how=how,
        )
        for name, value in figures.items()
    ]
    return Case(READING, Measurements(table))


def leak(change: float, next_share: float = 1.0) -> Case:
    return wired(later_tokens=change, targets_next=next_share)


def starved_weight(
    needed: float, share: float, site: str = "layers.3.mlp.weight", how: str = "exact"
) -> Case:
    return wired(site, how, at_no_gradient=1.0, at_needed=needed, needed_share=share)


def frozen_branches(*blocks: int, adapted: bool = False, attention_only: bool = False) -> Case:
    rows = [("wiring/frozen", "", 0.3)]
    for index in range(12):
        for name in ("attn", "mlp"):
            still = index in blocks and not (attention_only and name == "mlp")
            rows.append(("wiring/frozen", f"layers.{index}.{name}", float(still)))
            rows += [("wiring/adapted", f"layers.{index}.{name}", 1.0)] if still and adapted else []
    return case(*rows)


def clipped(factor: float = 1e-6, share: float = 1.0, rest: float = 0.5) -> Case:
    return wired("head.bias", clip_factor=factor, at_norm_share=share, clipped_rest=rest)


def task(
    same: float = 0.0, next_: float = 0.0, after: float = 0.0, later: float = 0.0, **more: float
) -> Case:
    figures = {
        "targets_same": same,
        "targets_next": next_,
        "targets_after_next": after,
        "later_tokens": later,
    }
    return wired(**figures, **more)


def loss_error(nats: float, gradient: float) -> Case:
    return wired(loss_error=nats, loss_gradient_error=gradient, how="exact; log_softmax in bfloat16")


SEEN, MATCH, GUESS = wiring_flow.SEEN, wiring_loss.MATCH, 5.0
PER_STEP = -math.log(1 - wiring_recipe.LOSES) / wiring_recipe.RUN_STEPS
TRAINS = case(forecast=trial("trains"))
DEEP = structure.POST_LN_WARNING
WRONG = "derivative/relative-error"
FLUSHED, COSINE = "precision/float16-flushed", "precision/bfloat16-cosine"
EPS, MEDIAN = "precision/eps", "precision/eps-ratio-median"

PAIRS: dict[str, list[Pair]] = {
    "NS101": [
        Pair(
            "depth of a note",
            N,
            updates(structure.POST_LN_NOTE, 1.0),
            updates(structure.POST_LN_NOTE - 1, 1.0),
        ),
        Pair("depth of a warning", W, updates(DEEP, 1.0), case(reading=anatomy(DEEP, "pre"))),
        Pair(
            "scaled skip",
            W,
            case(reading=anatomy(DEEP, "post", stream_scale=1.0)),
            case(reading=anatomy(DEEP, "post", stream_scale=2.2)),
        ),
        Pair(
            "learnt scale",
            W,
            case(reading=anatomy(DEEP, "post")),
            case(reading=anatomy(DEEP, "post", stream_scale="learnt")),
        ),
        Pair(
            "scheme",
            W,
            case(reading=anatomy(DEEP, "post")),
            case(reading=anatomy(DEEP, "post", scheme="b2t")),
        ),
        Pair("small start is a note", N, updates(DEEP, structure.SMALL_UPDATE * UNDER), case()),
        Pair("large start is a warning", W, updates(DEEP, structure.SMALL_UPDATE * OVER), case()),
    ],
    "NS102": [
        Pair("pre", W, case(reading=anatomy(final=False)), case()),
        Pair(
            "post ends in a norm",
            W,
            case(reading=anatomy(4, "peri", final=False)),
            case(reading=anatomy(4, "post", final=False)),
        ),
        Pair(
            "not read to its end",
            W,
            case(reading=anatomy(final=False)),
            case(reading=partly(anatomy(final=False))),
        ),
        Pair(
            "read by weights",
            W,
            case(reading=read_by("weights")),
            case(reading=read_by("norm")),
        ),
        Pair(
            "read by nothing",
            N,
            case(reading=read_by("nothing")),
            case(reading=read_by("norm")),
        ),
        Pair("2 blocks of our runs", N, ending(1.65), case()),
        Pair("it grows", W, ending(7.5 * structure.KEPT * OVER, 7.5), case()),
        Pair("it keeps its size", N, ending(7.5 * structure.KEPT * UNDER, 7.5), case()),
        Pair("12 blocks of our runs", W, ending(2.73), case()),
        Pair("unit size is a note", N, ending(structure.UNIT * UNDER), case()),
        Pair("larger is a warning", W, ending(structure.UNIT * OVER), case()),
        Pair("half of it is a note", N, ending(OVER / structure.UNIT), case()),
        Pair("smaller is a warning", W, ending(UNDER / structure.UNIT), case()),
        Pair(
            "a gate forgets",
            W,
            case(reading=anatomy(final=False)),
            case(reading=anatomy(final=False, join="gate", stream_scale="learnt")),
        ),
    ],
    "NS103": [
        Pair("copies", W, copies(1.0), copies(0.0)),
        Pair(
            "a sure trial trains", N, tried(copies(1.0), "trains", 0.97), tried(copies(0.0), "trains", 0.97)
        ),
        Pair("an unsure one", W, tried(copies(1.0), "trains", 0.85), tried(copies(0.0), "trains", 0.85)),
        Pair("an unknown one", W, tried(copies(1.0), "trains", None), tried(copies(0.0), "trains", None)),
        Pair("a sure failure", W, tried(copies(1.0), "slow", 0.01), tried(copies(0.0), "slow", 0.01)),
        Pair(
            "only with a warm-up",
            W,
            tried(copies(1.0), "needs-warmup", 0.97),
            tried(copies(0.0), "slow", 0.01),
        ),
    ],
    "NS104": [
        Pair("a part", N, case(reading=replace(READING, unread=("an opaque op",))), case()),
        Pair("all", W, case(reading=Anatomy((), ("no adds",))), case()),
    ],
    "NS201": [Pair("growth", W, half_depth(signal.GROWTH * OVER), half_depth(signal.GROWTH * UNDER))],
    "NS202": [
        Pair("trial", E, case(forecast=trial("collapses")), TRAINS),
        Pair(
            "initialisation",
            W,
            case(
                ("stream/diversity", "layers.input", 0.5),
                ("stream/diversity", "layers.hidden", 0.5 * signal.UNIFORM * UNDER),
            ),
            case(
                ("stream/diversity", "layers.input", 0.5),
                ("stream/diversity", "layers.hidden", 0.5 * signal.UNIFORM * OVER),
            ),
        ),
    ],
    "NS203": [Pair("one", W, dead(0.0), dead(1.0)), Pair("all", E, dead(0.0, 24), dead(1.0, 24))],
    "NS204": [
        Pair("level", W, declining(0.5, signal.DECLINE * UNDER), declining(0.5, signal.DECLINE * OVER)),
        Pair(
            "small everywhere",
            W,
            declining(0.01, 0.01 * signal.DECLINE_FALL * UNDER),
            declining(0.01, 0.01 * signal.DECLINE_FALL * OVER),
        ),
    ],
    "NS205": [
        Pair(
            "all",
            W,
            case(*everywhere("attention/entropy", signal.ENTROPY * UNDER)),
            case(*everywhere("attention/entropy", signal.ENTROPY * OVER)),
        ),
        Pair(
            "one of many",
            N,
            case(*everywhere("attention/entropy", 0.9), ("attention/entropy", "x", signal.ENTROPY * UNDER)),
            case(*everywhere("attention/entropy", 0.9)),
        ),
    ],
    "NS206": [
        Pair(
            "all",
            W,
            case(*everywhere("attention/logit-spread", signal.CONDENSED * OVER)),
            case(*everywhere("attention/logit-spread", signal.SPREAD * UNDER)),
        ),
        Pair(
            "half of them",
            W,
            case(
                *everywhere("attention/logit-spread", signal.CONDENSED * OVER, 1),
                ("attention/logit-spread", "x", 0.1),
            ),
            case(*everywhere("attention/logit-spread", 0.1)),
        ),
        Pair(
            "wide in all, condensed in none",
            N,
            case(*everywhere("attention/logit-spread", signal.CONDENSED * UNDER)),
            case(*everywhere("attention/logit-spread", signal.SPREAD * UNDER)),
        ),
        Pair(
            "one of many",
            N,
            case(*everywhere("attention/logit-spread", 0.1), ("attention/logit-spread", "x", 3.0)),
            case(*everywhere("attention/logit-spread", 0.1)),
        ),
    ],
    "NS301": [
        Pair("ends", W, ends(UNDER / gradient.SPREAD), ends(OVER / gradient.SPREAD)),
        Pair("in part", N, partly_read(ends(UNDER / gradient.SPREAD)), ends(OVER / gradient.SPREAD)),
    ],
    "NS302": [
        Pair("ends", W, ends(OVER * gradient.SPREAD), ends(UNDER * gradient.SPREAD)),
        Pair("in part", N, partly_read(ends(OVER * gradient.SPREAD)), ends(UNDER * gradient.SPREAD)),
    ],
    "NS303": [
        Pair("all", W, starved(gradient.STARVED * UNDER), starved(gradient.STARVED * OVER)),
        Pair("keys are fed", W, starved(gradient.STARVED * UNDER), starved_queries()),
        Pair("few", N, starved(gradient.STARVED * UNDER, 5), starved(gradient.STARVED * OVER, 5)),
        Pair("one key", W, starved(0.0), with_one_key(starved(0.0))),
        Pair("behind a zero start", W, starved(0.0), with_freed(starved(0.0))),
        Pair("another zero start", W, with_freed(starved(0.0), 11), with_freed(starved(0.0))),
        Pair("nearly zero", W, with_freed(starved(1e-30)), with_freed(starved(0.0))),
    ],
    "NS304": [
        Pair(
            "a branch",
            W,
            case((WRONG, "layers.3.attn", gradient.WRONG * OVER), (WRONG, "layers.4.attn", 0.0)),
            case((WRONG, "layers.3.attn", gradient.WRONG * UNDER)),
        ),
        Pair(
            "partly read",
            N,
            case((WRONG, "layers.3.attn", 1.0), reading=partly(READING)),
            case((WRONG, "layers.3.attn", 0.0), reading=partly(READING)),
        ),
    ],
    "NS401": [
        Pair(
            "a faint token",
            W,
            gain(2 * jacobian.DECADES, 10**-jacobian.DECADES * OVER),
            gain(2 * jacobian.DECADES, 10**-jacobian.DECADES * UNDER),
        ),
        Pair("in part", N, partly_read(gain(jacobian.DECADES * OVER)), gain(jacobian.DECADES * UNDER)),
        Pair("contraction", W, gain(-jacobian.DECADES * OVER), gain(-jacobian.DECADES * UNDER)),
        Pair("expansion", W, gain(jacobian.DECADES * OVER), gain(jacobian.DECADES * UNDER)),
    ],
    "NS501": [
        Pair(
            "near",
            N,
            headroom(precision.HEADROOM_BITS * UNDER),
            headroom(precision.HEADROOM_BITS * OVER),
        ),
        Pair("near, in float16", W, headroom(1.0, "float16"), headroom(precision.HEADROOM_BITS, "float16")),
        Pair("over", W, headroom(-0.01), headroom(precision.HEADROOM_BITS)),
        Pair("over, in float16", E, headroom(-0.01, "float16"), headroom(precision.HEADROOM_BITS, "float16")),
    ],
    "NS502": [
        Pair("share", N, share(FLUSHED, precision.FLUSHED * OVER), share(FLUSHED, precision.FLUSHED * UNDER)),
        Pair("in float16", W, share(FLUSHED, 0.9, "float16"), share(FLUSHED, 0.0, "float16")),
    ],
    "NS503": [
        Pair("cosine", N, share(COSINE, precision.COSINE * UNDER), share(COSINE, precision.COSINE * OVER)),
        Pair("in bfloat16", W, share(COSINE, 0.1, "bfloat16"), share(COSINE, 1.0, "bfloat16")),
    ],
    "NS504": [
        Pair("float32", N, norms(EPS, precision.TINY_EPS * UNDER), norms(EPS, precision.TINY_EPS * OVER)),
        Pair("float16", W, norms(EPS, 1e-12, dtype="float16"), norms(EPS, 1e-5, dtype="float16")),
    ],
    "NS505": [
        Pair(
            "large", N, norms(MEDIAN, precision.LARGE_EPS * OVER), norms(MEDIAN, precision.LARGE_EPS * UNDER)
        ),
        Pair("half drowned", W, norms(MEDIAN, precision.DROWNED * OVER, 6), norms(MEDIAN, 0.0)),
        Pair("few drowned", N, norms(MEDIAN, precision.DROWNED * OVER, 5), norms(MEDIAN, 0.0)),
        Pair("not drowned", N, norms(MEDIAN, precision.DROWNED * UNDER), norms(MEDIAN, 0.0)),
    ],
    "NS506": [Pair("born", E, case(("precision/non-finite", "layers.4.mlp", 1.0)), case())],
    "NS601": [
        Pair("outcome", E, case(forecast=trial("plateau")), TRAINS),
        Pair("unlikely", E, case(forecast=trial("plateau", certainty=0.49)), TRAINS),
        Pair("likely all the same", W, case(forecast=trial("plateau", certainty=0.5)), TRAINS),
    ],
    "NS602": [Pair("outcome", W, case(forecast=trial("needs-warmup")), TRAINS)],
    "NS603": [Pair("outcome", E, case(forecast=trial("diverges")), TRAINS)],
    "NS701": [
        Pair("change", E, leak(SEEN * OVER), leak(SEEN * UNDER)),
        Pair("most targets", E, leak(0.1, wiring_flow.ALL_NEXT), leak(0.1, 0.0)),
        Pair("some targets", N, leak(0.1, wiring_flow.PART_NEXT), leak(0.1, wiring_flow.PART_NEXT * UNDER)),
        Pair("a decoder's labels", E, wired(own_targets=SEEN * OVER), wired(own_targets=SEEN * UNDER)),
    ],
    "NS702": [
        Pair("change", E, wired(other_samples=SEEN * OVER), wired(other_samples=SEEN * UNDER)),
        Pair(
            "batch norm",
            N,
            wired(other_samples=0.5, how="exact; batch-norm; replaced"),
            wired(other_samples=0.0, how="exact; batch-norm; replaced"),
        ),
    ],
    "NS703": [
        Pair("content", W, wired(padding_content=SEEN * OVER), wired(padding_content=SEEN * UNDER)),
        Pair("loss", W, wired(padding_in_loss=0.01), wired(padding_in_loss=0.0)),
        Pair("an empty row", W, wired(masked_row=1.0), wired(masked_row=0.0)),
    ],
    "NS704": [
        Pair("half", E, starved_weight(1.0, wiring_learning.MOST_STARVED), case()),
        Pair("less", W, starved_weight(1.0, wiring_learning.MOST_STARVED * UNDER), case()),
        Pair("unused", N, starved_weight(0.0, 0.0, "pooler.weight"), case()),
        Pair(
            "a layer",
            W,
            starved_weight(0.0, 0.0, "layers.12.mlp.weight", "its module is never called"),
            case(),
        ),
        Pair("a part of a block", N, starved_weight(0.0, 0.0, how="its module is never called"), case()),
    ],
    "NS705": [
        Pair("in the middle", W, frozen_branches(5), frozen_branches()),
        Pair("half a block", W, frozen_branches(0, 1, attention_only=True), frozen_branches()),
        Pair("the lowest", N, frozen_branches(0, 1, 2), frozen_branches()),
        Pair("all", N, frozen_branches(*range(12)), frozen_branches()),
        Pair("adapters", N, frozen_branches(5, adapted=True), frozen_branches()),
    ],
    "NS706": [
        Pair("missing", W, wired("head.bias", held_share=0.9, at_not_held=1.0), wired(held_share=1.0)),
        Pair("none held", E, wired("head.bias", held_share=0.0, at_not_held=1.0), wired(held_share=1.0)),
        Pair("twice", W, wired("head.bias", at_held_twice=1.0), wired(held_share=1.0)),
        Pair("another model's", W, wired(foreign=3.0), wired(foreign=0.0)),
    ],
    "NS707": [
        Pair(
            "everywhere",
            W,
            wired("norm.weight", at_update_lost=1.0, update_lost=wiring_learning.LOST),
            wired("norm.weight", at_update_lost=wiring_learning.LOST * UNDER, update_lost=0.4),
        ),
        Pair(
            "in a tensor",
            N,
            wired("norm.weight", at_update_lost=wiring_learning.LOST, update_lost=0.1),
            wired("norm.weight", at_update_lost=wiring_learning.LOST * UNDER, update_lost=0.1),
        ),
    ],
    "NS708": [
        Pair(
            "over the guess",
            N,
            wired(first_loss=GUESS + wiring_start.OVER_GUESS * OVER, guess=GUESS, unit_head=64.0),
            wired(first_loss=GUESS + wiring_start.OVER_GUESS * UNDER, guess=GUESS, unit_head=64.0),
        ),
        Pair(
            "over a unit head",
            W,
            wired(first_loss=GUESS + 64 * OVER, guess=GUESS, unit_head=64.0),
            wired(first_loss=GUESS, guess=GUESS, unit_head=64.0),
        ),
    ],
    "NS709": [
        *(
            Pair(name, W, wired("head.bias", **{f"at_{name}": 0.9}), wired())
            for name in ("non_finite_weight", "huge_weight", "denormal_weight", "zero_gain")
        ),
        Pair("a copy", N, wired("layers.1.k.weight", at_copied_weight=1.0), wired()),
        Pair(
            "left to NS506",
            W,
            wired("head.bias", at_non_finite_weight=1.0),
            case(("wiring/non-finite-weight", "head.bias", 1.0), ("precision/non-finite", "head.bias", 1.0)),
        ),
    ],
    "NS710": [
        Pair("share", W, clipped(share=wiring_recipe.OWNS * 1.001), clipped(share=wiring_recipe.OWNS)),
        Pair("rest", W, clipped(rest=1.0), clipped(rest=OVER)),
        Pair("not clipped", W, clipped(), clipped(factor=1.0)),
    ],
    "NS711": [
        Pair(
            "over the run",
            N,
            wired("norm.weight", at_decay=PER_STEP * OVER),
            wired("norm.weight", at_decay=PER_STEP * UNDER),
        )
    ],
    "NS712": [
        Pair("the inputs", E, task(same=MATCH), task(same=MATCH * UNDER)),
        Pair("constant text", E, task(same=1.0), task(same=1.0, next_=1.0)),
        Pair("an autoencoder", E, task(same=1.0), task(same=1.0, later=0.5)),
        Pair("shifted twice", W, task(after=MATCH), task(after=MATCH * UNDER)),
        Pair("ignored", E, wired(labels_ignored=1.0), wired(labels_ignored=0.99)),
        Pair("out of range", E, wired(labels_out_of_range=1.0), wired(labels_out_of_range=0.0)),
    ],
    "NS713": [
        Pair("small", N, loss_error(wiring_loss.LOSS_ERROR * UNDER, 0.001), wired(loss_error=0.0)),
        Pair("loss", W, loss_error(wiring_loss.LOSS_ERROR * OVER, 0.001), wired(loss_error=0.0)),
        Pair("gradient", W, loss_error(0.0, wiring_loss.GRADIENT_ERROR * OVER), wired(loss_error=0.0)),
    ],
}
