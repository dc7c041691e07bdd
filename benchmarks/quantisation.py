"""`normscope bench quantisation`: is the place that `check --quantise` ranks first the most harmful one?

    python -m benchmarks.quantisation            # prints a line for each model, then the table

Twelve models of small size, trained for 100 steps of AdamW on byte text, so that their weights have
structure. The probe ranks the places of each for three formats and two granularities on its fixed batch of 4
sequences: 72 rankings. The truth is dense: each place is rounded alone in one forward, on 16 other sequences,
and its harm is ‖y' − y‖/‖y‖ there. The rule of the ranking was set on other models: `DEVELOPED_ON`.

A second truth on 16 further sequences says how often the truth itself names the same place twice. Ranking by
the lowest SQNR alone stands beside the probe. The output of the last stack is often the worst place, because
the head reads it; so the rankings are also compared without the outputs of stacks.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scipy.stats import spearmanr
from torch import nn

from benchmarks.process import Row, row
from normscope.anatomy import read_anatomy
from normscope.claims.quantisation import planted
from normscope.claims.training import train_together
from normscope.cli.progress import quiet_libraries
from normscope.probes import Measurements
from normscope.probes.quantisation import FORMATS, GRANULARITIES, PARTS, Rounding, measure_quantisation
from normscope.probes.quantisation.harm import harm, see
from normscope.probes.quantisation.look import Look, once
from normscope.probes.quantisation.places import Place
from normscope.subjects import Batch, Subject, load
from normscope.subjects.rng import seeded
from normscope.train import Recipe

_SMALL = "num_hidden_layers=4,hidden_size=64,num_attention_heads=4,intermediate_size=192,vocab_size=256"
DEVELOPED_ON = (
    "nn:decoder,scheme=pre,depth=4,width=48,heads=4",
    "nn:decoder,scheme=post,depth=4,width=48,heads=4",
    "hf:gpt2,n_layer=4,n_embd=64,n_head=4,vocab_size=256",
    f"hf:bert,{_SMALL}",
)
"""Models on which the rule was set, before the others were measured."""
MODELS: Mapping[str, Callable[[nn.Module], nn.Module] | None] = {
    "nn:decoder,scheme=pre,depth=6,width=64,heads=4": None,
    "nn:decoder,scheme=pre,depth=4,width=64,heads=2": planted,  # two channels of each norm × 30
    "nn:decoder,scheme=post,depth=4,width=64,heads=4": None,
    "nn:decoder,scheme=peri,depth=4,width=48,heads=4": None,
    "nn:decoder,scheme=deepnorm,depth=6,width=48,heads=4": None,
    "nn:encoder,scheme=pre,depth=4,width=64,heads=4": None,
    "nn:encoder-decoder,scheme=pre,depth=3,width=48,heads=4": None,
    f"hf:llama,{_SMALL}": None,
    f"hf:gpt_neox,{_SMALL}": None,
    "hf:opt,num_hidden_layers=4,hidden_size=64,num_attention_heads=4,ffn_dim=192,vocab_size=256,"
    "word_embed_proj_dim=64": None,
    "hf:t5,num_layers=3,d_model=64,num_heads=4,d_kv=16,d_ff=192,vocab_size=256": None,
    f"hf:roberta,{_SMALL}": None,
}
"""The held-out models, each with a change after its training."""
STEPS, RATE, TOKENS = 100, 1e-3, 32
"""Training steps, learning rate, and tokens of a sequence."""
SEQUENCES, FIRST = 16, 1000
"""Sequences of a truth, and the index of its batch among those of a subject with batches of that size."""
NEAR = 0.95
"""Share of the worst harm from which a place counts as near the worst."""

Harms = dict[object, float]
"""True harm of each place, by its key."""


@dataclass(frozen=True)
class Outcome:
    """One ranking against the truth.

    Attributes:
        rank: rank of the probe's first place in the truth, 1 for the worst.
        share: its true harm over the worst one.
        back: rank of the truly worst place in the probe's ranking.
        by_sqnr, sqnr_share: true rank and share of the place with the lowest SQNR.
        again: rank in the truth of the place that a second truth, on other sequences, has first.
        by_end: whether the output of the last stack, which the head reads, is the truly worst place.
        inner, inner_share: true rank and share of the probe's first place, both without the stacks' outputs.
        inner_again: the same rank of the second truth's first place.
        correlation: Spearman's, between the probe's ranks and the true harms.
    """

    rank: int
    share: float
    back: int
    by_sqnr: int
    sqnr_share: float
    again: int
    by_end: bool
    inner: int
    inner_share: float
    inner_again: int
    correlation: float


def trained(spec: str) -> Subject:
    """The model of `spec` after its training and its change."""
    subject = load(spec, seed=0, seq_len=TOKENS)
    recipe = Recipe(lr=RATE, steps=STEPS, seed=0)
    with seeded(0):  # OPT drops layers by Python's generator
        train_together(
            [subject.model], [subject.batches()], lambda model, batch: subject.loss(batch, model), [recipe]
        )
    change = MODELS.get(spec)
    if change is not None:
        subject.model = change(subject.model)
    return subject


def outcomes(subject: Subject, batches: Sequence[Batch]) -> Iterator[tuple[Rounding, Outcome]]:
    """Each ranking of the probe against the truth on the first batch; the second one is on the other."""
    anatomy = read_anatomy(subject)
    found = Measurements(measure_quantisation(subject, anatomy))
    look = Look.at(subject, anatomy)
    places = once(look.fit)
    for format, granularity in itertools.product(FORMATS, GRANULARITIES):
        rounding = Rounding(format, granularity)
        truth, again = (true_harms(look, places, rounding, batch) for batch in batches)
        ranks, ratios = (_by_place(found, places, rounding, stat) for stat in ("rank", "sqnr"))
        yield rounding, compared(truth, again, ranks, ratios, [stack.hidden for stack in anatomy.stacks])


def true_harms(look: Look, places: Sequence[Place], rounding: Rounding, batch: Batch) -> Harms:
    """Harm of rounding each place alone, on a batch that the probe has not seen."""
    before = see(look.subject, look.parameters, batch=batch)
    return {
        place.key: harm(before, see(look.subject, look.parameters, [place], rounding, batch)).change
        for place in places
    }


def _by_place(found: Measurements, places: Sequence[Place], rounding: Rounding, stat: str) -> Harms:
    rows = {part: found.of(f"quantisation/{part}-{rounding.name}-{stat}") for part in PARTS}
    return {place.key: rows[place.part][place.site] for place in places}


def compared(truth: Harms, again: Harms, ranks: Harms, ratios: Harms, outputs: Sequence[object]) -> Outcome:
    """The probe's first place, and that with the lowest SQNR, in the order of the truth."""
    order = sorted(truth, key=lambda key: -truth[key])
    first, lowest = min(ranks, key=ranks.__getitem__), min(ratios, key=ratios.__getitem__)
    worst = truth[order[0]]
    inner = [key for key in order if key not in outputs]
    best = min(inner, key=ranks.__getitem__)
    return Outcome(
        order.index(first) + 1,
        truth[first] / worst,
        int(ranks[order[0]]),
        order.index(lowest) + 1,
        truth[lowest] / worst,
        order.index(max(again, key=again.__getitem__)) + 1,
        order[0] == outputs[-1],
        inner.index(best) + 1,
        truth[best] / truth[inner[0]],
        inner.index(max(inner, key=again.__getitem__)) + 1,
        float(spearmanr([-ranks[key] for key in order], [truth[key] for key in order]).statistic),
    )


def bench_quantisation(specs: Sequence[str] = tuple(MODELS)) -> list[Row]:
    """The table of all models; a line for each model goes to stderr."""
    by_rounding: dict[str, list[Outcome]] = {}
    for spec in specs:
        start = time.perf_counter()
        subject = trained(spec)
        batches = load(spec, seed=0, seq_len=TOKENS, batch_size=SEQUENCES).batches(start=FIRST)
        for rounding, outcome in outcomes(subject, list(itertools.islice(batches, 2))):
            by_rounding.setdefault(rounding.name, []).append(outcome)
            print(f"{spec}  {rounding.name}  {outcome}", file=sys.stderr, flush=True)
        print(f"{spec}  {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    table = [_row(name, found) for name, found in by_rounding.items()]
    return [*table, _row("all", [outcome for found in by_rounding.values() for outcome in found])]


def _row(what: str, found: Sequence[Outcome]) -> Row:
    count = len(found)
    first, three = (sum(o.rank <= most for o in found) for most in (1, 3))
    near = sum(o.share >= NEAR for o in found)
    figure = f"{first} of {count} first, {three} in the first 3, {near} within 5 % of the worst"
    shares, lowest = ([getattr(o, name) for o in found] for name in ("share", "sqnr_share"))
    how = [
        f"least share of the worst harm {min(shares):.2f}, median {median(shares):.2f}",
        f"lowest SQNR: {sum(o.by_sqnr == 1 for o in found)} first, median share {median(lowest):.2f}",
        f"a second truth agrees in {sum(o.again == 1 for o in found)}",
        f"the last stack's output is the worst in {sum(o.by_end for o in found)}",
        f"without the stacks' outputs {sum(o.inner == 1 for o in found)} first, "
        f"{sum(o.inner <= 3 for o in found)} in the first 3",
        f"least share {min(o.inner_share for o in found):.2f}",
        f"there a second truth agrees in {sum(o.inner_again == 1 for o in found)}",
        f"median rank correlation {median(o.correlation for o in found):.2f}",
    ]
    return row(what, figure, "", "; ".join(how))


def main() -> None:
    """Print the table."""
    with quiet_libraries():
        rows = bench_quantisation(tuple(sys.argv[1:]) or tuple(MODELS))
    for each in rows:
        print(f"{each['what']:14} {each['figure']}; {each['how']}")


if __name__ == "__main__":
    main()
