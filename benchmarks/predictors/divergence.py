"""The grid of divergence: models with norms and without, on recall and on text, at four learning rates.

    nice -n 19 python -m benchmarks.predictors.divergence FILE [--part set-on|held-out|last|all] [--only WORD]

It follows the normalisation sweep of arXiv:2602.22988, section 5.2 and appendix D.1, at a small size: five
placements of norms, and no norm, on associative recall, with AdamW. That sweep has one kind of model
without norms, so that "has no norm at all" decides it. Here are five, three of which are made to train
(T-Fixup, Fixup, ReZero). The grid was fixed before any run of it was trained and before any AUROC; the code
of the predictors was tried on four of its models. One line of JSON is one run; an interrupted command is
continued. The runs of `GRID` were trained alone, the others as stacks.

`GRID` is that grid. `SECOND` has other schemes, starts, depths, widths, learning rates and text, recall of
more pairs, and DyT: it was held out for a first form of normscope's risk of divergence. The present form was
set on both. `HELD_OUT` differs from both again: it was fixed before that form was fitted, and scored once.
`LAST` was fixed before a range test became a part of the risk, because `HELD_OUT` had been seen by then.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.forecast.cells import help_topics, licences
from benchmarks.process import records_of, rounded
from normscope.subjects import Subject, load, make_subject
from normscope.subjects.subject import LOSS_INPUTS
from normscope.train import Recipe, Trials, endless, in_flushed_thread, last_loss, many_trials

PREFIX = "divergence: "
NORMED = ("pre,init=gpt2", "pre,norm=rmsnorm,init=gpt2", "post", "deepnorm", "sub-ln")
NORM_FREE = ("residual-no-norm", "residual-no-norm,init=gpt2", "t-fixup", "fixup", "rezero")
DEPTHS = (4, 12)
TASKS = ("recall", "text")
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
REPLICAS, STEPS = 2, 300
WIDTH, HEADS, VOCABULARY, LENGTH, BATCH, PAIRS = 32, 2, 256, 64, 16, 4
PAD, FIRST_KEY, FIRST_VALUE = 0, 1, 128


@dataclass(frozen=True)
class Case:
    """One model and its task; `seed` of the first replica.

    Attributes:
        task: "text" is the standard library's source, "licences" and "help" are the texts of
            `forecast.cells`, "arrays" is the source of NumPy's `numpy.lib`, "recall" asks for one of `pairs`
            in `batch` sequences.
        held_out: whether the rule of the risk was fixed before the case's runs were seen.
        last: whether it is one of the held-out cases that were fixed last.
    """

    scheme: str
    depth: int
    task: str
    seed: int
    width: int = WIDTH
    rates: tuple[float, ...] = RATES
    pairs: int = PAIRS
    batch: int = BATCH
    held_out: bool = False
    last: bool = False

    @property
    def part(self) -> str:
        """The part of the grid: "set-on", "held-out" or "last"."""
        if self.last:
            return "last"
        return "held-out" if self.held_out else "set-on"

    @property
    def name(self) -> str:
        """The name in truth files."""
        width = "" if self.width == WIDTH else f", d {self.width}"
        return f"{PREFIX}{self.scheme} {self.depth} {self.task}{width}"

    def subject(self, seed: int) -> Subject:
        """The model and its batches."""
        size = f"depth={self.depth},width={self.width},heads={HEADS},vocab={VOCABULARY}"
        texts = {"licences": licences, "help": help_topics, "arrays": _arrays}
        text = texts[self.task]() if self.task in texts else None
        found = load(f"nn:decoder,scheme={self.scheme},{size}", seed=seed, text=text)
        if self.task != "recall":
            return found
        return make_subject(
            found.model, _Recall(seed, self.pairs, self.batch), last_token, seed=seed, spec=self.name
        )


GRID: tuple[Case, ...] = tuple(
    Case(scheme, depth, task, 7000 + number)
    for number, (scheme, depth, task) in enumerate(
        (scheme, depth, task) for scheme in (*NORMED, *NORM_FREE) for depth in DEPTHS for task in TASKS
    )
)

Row = tuple[str, int, int, str]
"""Scheme, depth, width and task."""


def _cases(
    seed: int, rates: tuple[float, ...], pairs: int, batch: int, rows: Sequence[Row], **options: bool
) -> tuple[Case, ...]:
    """Cases of a grid, whose seeds count from `seed`."""
    return tuple(
        Case(scheme, depth, task, seed + number, width, rates, pairs, batch, **options)
        for number, (scheme, depth, width, task) in enumerate(rows)
    )


SECOND = _cases(
    9100,
    (2e-3, 7e-3, 2e-2, 6e-2),
    pairs=6,
    batch=4,
    rows=(
        ("dyt", 6, 48, "licences"),
        ("pre,init=xavier", 10, 24, "licences"),
        ("skipinit", 8, 24, "recall"),
        ("residual-no-norm,init=torch", 6, 24, "licences"),
        ("post,init=gpt2", 10, 24, "licences"),
        ("dyt", 8, 24, "recall"),
        ("gpt2", 9, 24, "recall"),
        ("sigma-reparam,norm=none", 8, 24, "licences"),
        ("dyt,init=xavier", 10, 24, "licences"),
        ("peri", 7, 24, "recall"),
        ("residual-no-norm,init=normal", 6, 48, "recall"),
        ("admin", 6, 48, "recall"),
        ("rezero", 7, 24, "licences"),
        ("hybridnorm", 8, 24, "licences"),
        ("fixup", 9, 24, "licences"),
        ("normformer", 7, 24, "recall"),
        ("highway", 9, 24, "recall"),
        ("pre-no-final,init=xavier", 7, 24, "licences"),
        ("derf", 9, 24, "licences"),
        ("olmo2", 6, 48, "licences"),
    ),
)

HELD_OUT = _cases(
    11_300,
    (1.5e-3, 5e-3, 1.5e-2, 4.5e-2),
    pairs=3,
    batch=8,
    held_out=True,
    rows=(
        ("residual-no-norm,init=xavier", 5, 40, "help"),
        ("residual-no-norm,init=torch", 11, 24, "recall"),
        ("residual-no-norm,init=normal", 8, 24, "help"),
        ("residual-no-norm", 5, 24, "recall"),
        ("skipinit", 11, 40, "help"),
        ("skipinit", 5, 24, "recall"),
        ("t-fixup", 8, 40, "recall"),
        ("fixup", 5, 40, "recall"),
        ("rezero", 11, 24, "recall"),
        ("highway", 5, 40, "help"),
        ("highway", 8, 24, "recall"),
        ("unit-scaling", 8, 24, "help"),
        ("depth-mup", 5, 24, "recall"),
        ("gtrxl", 5, 24, "help"),
        ("layerscale", 8, 40, "recall"),
        ("parallel", 11, 24, "help"),
        ("keel", 8, 24, "recall"),
        ("post,init=xavier", 5, 40, "recall"),
        ("pre-no-final,init=normal", 8, 40, "help"),
        ("seednorm", 5, 24, "help"),
        ("dyt,init=torch", 5, 24, "recall"),
        ("derf,init=xavier", 11, 24, "recall"),
    ),
)

LAST = _cases(
    13_500,
    (1.2e-3, 4e-3, 1.2e-2, 3.6e-2),
    pairs=5,
    batch=12,
    held_out=True,
    last=True,
    rows=(
        ("residual-no-norm,init=fan-in", 3, 44, "arrays"),
        ("residual-no-norm,init=small", 9, 28, "recall"),
        ("residual-no-norm,init=torch", 13, 28, "arrays"),
        ("residual-no-norm,init=zero-output", 3, 28, "recall"),
        ("skipinit", 9, 44, "arrays"),
        ("skipinit,init=torch", 13, 28, "recall"),
        ("t-fixup", 9, 28, "arrays"),
        ("t-fixup", 13, 28, "recall"),
        ("fixup", 3, 44, "arrays"),
        ("rezero", 3, 28, "recall"),
        ("highway", 13, 28, "arrays"),
        ("admin", 13, 28, "arrays"),
        ("sub-ln", 3, 28, "recall"),
        ("post,init=small", 9, 44, "recall"),
        ("pre,init=fan-in", 13, 28, "arrays"),
        ("b2t", 9, 28, "recall"),
        ("mix-ln", 13, 28, "recall"),
        ("res-post", 3, 44, "arrays"),
        ("scalenorm", 9, 28, "recall"),
        ("deepnorm,init=torch", 13, 28, "recall"),
        ("dyt,init=small", 9, 28, "arrays"),
        ("derf,init=torch", 3, 44, "recall"),
    ),
)

SET_ON = (*GRID, *SECOND)
CASES = (*SET_ON, *HELD_OUT, *LAST)
PARTS = {"set-on": SET_ON, "held-out": HELD_OUT, "last": LAST}


def _arrays() -> Path:
    """The source of NumPy's `numpy.lib`."""
    return Path(numpy.lib.__file__).parent


@dataclass(frozen=True)
class _Recall:
    """Batches of associative recall that start again at each iteration."""

    seed: int
    pairs: int
    batch: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return recall(self.seed, self.pairs, self.batch)


def recall(seed: int, pairs: int = PAIRS, batch: int = BATCH) -> Iterator[dict[str, Any]]:
    """Endless batches [k₁, v₁, …, k_p, v_p, padding, q]; the target is the value of the key q."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids_BT = torch.full((batch, LENGTH), PAD)
        order = torch.rand(batch, FIRST_VALUE - FIRST_KEY, generator=generator).argsort(1)
        keys_BP = FIRST_KEY + order[:, :pairs]
        values_BP = torch.randint(FIRST_VALUE, VOCABULARY, (batch, pairs), generator=generator)
        ids_BT[:, 0 : 2 * pairs : 2], ids_BT[:, 1 : 2 * pairs : 2] = keys_BP, values_BP
        asked_B1 = torch.randint(pairs, (batch, 1), generator=generator)
        ids_BT[:, -1:] = keys_BP.gather(1, asked_B1)
        yield {"ids": ids_BT, LOSS_INPUTS: (values_BP.gather(1, asked_B1)[:, 0],)}


def last_token(output: Any, batch: Any) -> Tensor:
    """Cross-entropy of the last position's logits."""
    return functional.cross_entropy(output.logits[:, -1], batch[LOSS_INPUTS][0])


def diverged_from_start(row: dict[str, Any]) -> bool:
    """True if a loss was not finite, or the mean of the last losses is above the first loss."""
    return row["last"] is None or row["last"] > row["first"]


def diverged_as_published(row: dict[str, Any]) -> bool:
    """True if at any step the loss was above 50 or the norm of the gradients above 500 (arXiv:2602.22988)."""
    sizes = (row["last"], row["largest loss"], row["largest gradient"])
    return None in sizes or row["largest loss"] > 50 or row["largest gradient"] > 500


CRITERIA: dict[str, Callable[[dict[str, Any]], bool]] = {
    "start": diverged_from_start,
    "paper": diverged_as_published,
}


def run(
    case: Case, replicas: Iterable[int], rates: Iterable[float], steps: int = STEPS
) -> list[dict[str, Any]]:
    """Train `replicas` at each of `rates` as a stack, and return a row for each run."""
    runs = [(replica, case.seed + 500 * replica, lr) for replica in replicas for lr in rates]
    subjects = [case.subject(seed) for _, seed, _ in runs]
    recipes = [Recipe(optimizer="adamw", lr=lr, seed=seed, steps=steps) for _, seed, lr in runs]
    started = time.process_time()

    def train(checkpoint: Callable[[], None]) -> Trials:
        torch.manual_seed(case.seed)
        models = [subject.model.train() for subject in subjects]
        feeds = [endless(subject.batches) for subject in subjects]
        loss = subjects[0].loss
        trials = many_trials(models, feeds, lambda model, batch: loss(batch, model), recipes)
        while trials.step < steps and trials.live:
            checkpoint()
            trials.advance()
        return trials

    trials = in_flushed_thread(train)
    seconds = round((time.process_time() - started) / len(runs), 2)
    found = zip(runs, trials.losses, trials.gradient_norms, strict=True)
    return [
        _row(case, lr, replica, losses, norms) | {"seconds": seconds}
        for (replica, _, lr), losses, norms in found
    ]


def _row(
    case: Case, lr: float, replica: int, losses: Sequence[float], norms: Sequence[float]
) -> dict[str, Any]:
    return {
        "case": case.name,
        "replica": replica,
        "lr": lr,
        "first": rounded(losses[0]),
        "last": rounded(last_loss(losses)) if math.isfinite(losses[-1]) else None,
        "largest loss": rounded(max(losses)),
        "largest gradient": rounded(max(norms)),
        "steps": len(losses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--only", default="", help="part of the names of cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {(row["case"], row["replica"], row["lr"]) for row in records_of(options.file)}
    for case in PARTS.get(options.part, CASES):
        wanted = {(case.name, replica, lr) for replica in range(REPLICAS) for lr in case.rates}
        if options.only not in case.name or wanted <= known:
            continue
        with options.file.open("a") as file:
            for row in run(case, range(REPLICAS), case.rates):
                if (case.name, row["replica"], row["lr"]) not in known:
                    file.write(json.dumps(row) + "\n")
        print(f"{case.name}: trained", flush=True)
    rows = records_of(options.file)
    for name, diverged in CRITERIA.items():
        print(f"{name}: {sum(map(diverged, rows))} of {len(rows)} runs diverged")


if __name__ == "__main__":
    main()
