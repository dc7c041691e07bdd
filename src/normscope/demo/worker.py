"""One process of the demo: trains conditions, those of one shape as one stack, and prints lines of JSON.

Each line has a part of one run: {"condition", "seed", "losses", "diversity"}. The first line of a stack is
{"unigram_entropy"}.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import torch

from normscope.anatomy import read_anatomy
from normscope.demo.settings import CONDITIONS, Settings
from normscope.forecast.evaluator import Evaluator
from normscope.subjects import load
from normscope.train import TrialStack

Cell = tuple[int, int]
"""Index of a condition, and a seed."""
Line = dict[str, object]


def looks_at(settings: Settings) -> list[int]:
    """Steps after which token diversity is measured, with most of them early, when it falls."""
    early = [step for step in (0, 1, 2, 5) if step < settings.look]
    return [step for step in early if step < settings.steps] + [
        *range(settings.look, settings.steps, settings.look),
        settings.steps,
    ]


def shelves(conditions: Sequence[int], settings: Settings) -> list[list[Cell]]:
    """The runs of `conditions`, grouped by model."""
    by_model: dict[str, list[Cell]] = {}
    for index in conditions:
        cells = by_model.setdefault(CONDITIONS[index].model(settings), [])
        cells += [(index, seed) for seed in settings.seeds]
    return list(by_model.values())


def work(conditions: Sequence[int], settings: Settings) -> Iterator[Line]:
    """Yield all lines of the runs of `conditions`; their stacks advance in turns."""
    for lines in zip(*(train_stack(cells, settings) for cells in shelves(conditions, settings)), strict=True):
        yield from chain(*lines)


def train_stack(cells: Sequence[Cell], settings: Settings) -> Iterator[list[Line]]:
    """Train runs of one shape as one stack.

    Yields the unigram entropy, then, at each measurement, a line per run.
    """
    batch, tokens = settings.batch_size, settings.seq_len
    subjects = [
        load(CONDITIONS[index].model(settings), seed=seed, batch_size=batch, seq_len=tokens)
        for index, seed in cells
    ]
    first = subjects[0]
    anatomy = read_anatomy(first)
    evaluators = [Evaluator.of(subject, anatomy, subject.model) for subject in subjects]
    stack = TrialStack(
        [subject.model for subject in subjects],
        [subject.batches() for subject in subjects],
        lambda model, batch: first.loss(batch, model),
        [CONDITIONS[index].config(settings, seed) for index, seed in cells],
    )
    yield [{"unigram_entropy": first.unigram_entropy}]
    for before, now in pairwise([0, *looks_at(settings)]):
        for _ in range(now - before):
            stack.advance()
        lines: list[Line] = []
        for (index, seed), evaluator, losses in zip(cells, evaluators, stack.losses, strict=True):
            # A run stops at a loss that is not finite; that loss is repeated for the later steps.
            new = (losses + losses[-1:] * (now - len(losses)))[before:]
            diversity = next(iter(evaluator.state()[1].values()))
            lines.append({"condition": index, "seed": seed, "losses": new, "diversity": diversity})
        yield lines


def main(words: Sequence[str]) -> None:
    """`python -m normscope.demo.worker SETTINGS CONDITIONS`: JSON, and indices with commas."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # collapsed runs have many denormals, which are slow
    for line in work([int(index) for index in words[1].split(",")], Settings(**json.loads(words[0]))):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
