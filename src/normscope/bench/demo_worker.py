"""One process of the demo: trains conditions, those of one shape as one stack, and prints lines of JSON.

Each line is a stretch of one run: {"condition", "seed", "losses", "diversity"}; the first line of all is
{"unigram_entropy"}.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from normscope.anatomy import read_anatomy
from normscope.bench.demo_settings import CONDITIONS, Settings
from normscope.forecast.evaluator import Evaluator
from normscope.subjects import load
from normscope.train import TrialStack

Cell = tuple[int, int]
"""Index of a condition, and a seed."""


class Shelf:
    """Runs of one shape, trained as one stack, with an evaluator on the tokens of each."""

    def __init__(self, cells: Sequence[Cell], settings: Settings) -> None:
        self.cells = cells
        self._steps = 0
        subjects = [
            load(
                CONDITIONS[index].model(settings),
                seed=seed,
                batch_size=settings.batch_size,
                seq_len=settings.seq_len,
            )
            for index, seed in cells
        ]
        first = subjects[0]
        anatomy = read_anatomy(first)
        assert first.unigram_entropy is not None, "a text has one"
        self.unigram_entropy = first.unigram_entropy
        self._evaluators = [Evaluator(subject, anatomy, subject.model) for subject in subjects]
        self._stack = TrialStack(
            [subject.model for subject in subjects],
            [subject.batches() for subject in subjects],
            lambda model, batch: first.loss(batch, model),
            [CONDITIONS[index].config(settings, seed) for index, seed in cells],
        )

    def look(self, new_losses: int) -> Iterator[dict[str, object]]:
        """A line for each run: its last losses, and the diversity of its tokens now."""
        for k, (index, seed) in enumerate(self.cells):
            _, diversity = self._evaluators[k].state()
            losses = self._losses(k)
            yield {
                "condition": index,
                "seed": seed,
                "losses": losses[len(losses) - new_losses :],
                "diversity": next(iter(diversity.values())),
            }

    def advance(self, steps: int) -> None:
        """Take `steps` steps of all runs."""
        for _ in range(steps):
            self._stack.advance()
        self._steps += steps

    def _losses(self, k: int) -> list[float]:
        """Losses of every step of a run; a run with a loss that is not finite stops and repeats it."""
        losses = self._stack.losses[k]
        return losses + losses[-1:] * (self._steps - len(losses))


def looks_at(settings: Settings) -> list[int]:
    """Steps after which token diversity is measured: densely in the first steps, which decide the run."""
    early = [step for step in (0, 1, 2, 5) if step < settings.look]
    return [step for step in early if step < settings.steps] + [
        *range(settings.look, settings.steps, settings.look),
        settings.steps,
    ]


def shelves(conditions: Sequence[int], settings: Settings) -> list[list[Cell]]:
    """The runs of `conditions`, those of one model together."""
    by_model: dict[str, list[Cell]] = {}
    for index in conditions:
        cells = by_model.setdefault(CONDITIONS[index].model(settings), [])
        cells += [(index, seed) for seed in settings.seeds]
    return list(by_model.values())


def work(conditions: Sequence[int], settings: Settings) -> Iterator[dict[str, object]]:
    """All lines of the runs of `conditions`, which go forward side by side."""
    made = [Shelf(cells, settings) for cells in shelves(conditions, settings)]
    yield {"unigram_entropy": made[0].unigram_entropy}
    looks = looks_at(settings)
    for shelf in made:
        yield from shelf.look(0)
    for before, now in pairwise(looks):
        for shelf in made:
            shelf.advance(now - before)
            yield from shelf.look(now - before)


def main(words: Sequence[str]) -> None:
    """`python -m normscope.bench.demo_worker SETTINGS CONDITIONS`, conditions by index with commas."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a collapsed run fills with denormals
    for line in work([int(index) for index in words[1].split(",")], Settings.of_json(words[0])):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
