"""Error of the loss to beat on the last 20 batches of a run: of their own entropy, and of that of the text.

    python -m benchmarks.batch_entropy

The truth is the cross-entropy of the targets of batches 280 to 299 (4 × 64 tokens) under the frequencies of
the whole text. The two estimates are made from the first batches alone, as `check` makes them from a user's
batches. Printed is the root mean square of their errors over seeds, in nats.
"""

import itertools
import statistics

import numpy as np

from benchmarks.regimes import data
from normscope.forecast.batch_entropy import SampledCrossEntropy
from normscope.forecast.entropy import estimate
from normscope.subjects.stored import Stored

TEXTS = (("arrays", 256), ("arrays", 2048), ("solvers", 8192), ("library", 32_000))
NUMBERS = (16, 64, 256, 512)
SEEDS = 12
LAST = range(280, 300)
PLACE = Stored(0, 1, data.IGNORED)


def errors(ids: np.ndarray, num: int, seed: int) -> tuple[float, float]:
    """Errors of the entropy of the text and of that of the batches, from `num` batches of ids (N,)."""
    batches = [
        PLACE.sequences(batch)
        for batch in itertools.islice(data.windows(ids, 4, 64, seed), max(num, LAST.stop))
    ]
    whole = estimate([row for rows in batches[:num] for row in rows]).value
    own = SampledCrossEntropy.of(PLACE, whole, batches[:num])
    again = list(itertools.islice(data.windows(ids, 4, 64, seed), LAST.stop))[LAST.start :]
    truth = statistics.fmean(data.cross_entropy_of(np.concatenate(batches[k]), ids) for k in LAST)
    found = [each for batch in again if (each := own(batch)) is not None]
    return whole - truth, statistics.fmean(found) - truth


def main() -> None:
    print("text, ids, batches read: error of the text's entropy, of the batches' own (nats)")
    for (text, vocabulary), num in itertools.product(TEXTS, NUMBERS):
        ids = data.ids_of(text, vocabulary)
        found = np.array([errors(ids, num, seed) for seed in range(SEEDS)])
        whole, own = np.sqrt(np.square(found).mean(0))
        print(f"{text}, {vocabulary}, {num}: {whole:.3f}, {own:.3f}", flush=True)


if __name__ == "__main__":
    main()
