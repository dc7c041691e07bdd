"""Error of the entropy of a text, estimated from a few batches: `python -m benchmarks.entropy [FILE …]`.

Each batch is 4 sequences of 64 tokens at random places. Tokens are bytes, pieces of words of at most four
letters, and whole words. The truth is the entropy of the frequencies in the whole text.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from scipy.special import digamma

from normscope.forecast.entropy import chao_wang_jost, estimate
from normscope.forecast.targets import LARGEST_ERROR
from normscope.subjects.text import standard_library

BATCHES = (1, 4, 16, 64, 256, 1024)
ROWS, LENGTH = 4, 64
REPEATS = 24
TOKENS: dict[str, Callable[[str], list]] = {
    "bytes": lambda text: list(text.encode()),
    "pieces": lambda text: re.findall(r" ?\w{1,4}|[^\w\s]|\s+", text),
    "words": lambda text: re.findall(r"\w+|[^\w\s]|\s+", text),
}


def plain(counts: np.ndarray) -> float:
    """Entropy of the sample's own frequencies."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def miller_madow(counts: np.ndarray) -> float:
    """Miller 1955: the plain entropy and (V − 1)/2n."""
    return plain(counts) + ((counts > 0).sum() - 1) / (2 * counts.sum())


def grassberger(counts: np.ndarray) -> float:
    """Grassberger 2003, arXiv:physics/0307138, equation 35."""
    counts = counts[counts > 0].astype(float)
    terms = digamma(counts) + 0.5 * (-1.0) ** counts * (digamma((counts + 1) / 2) - digamma(counts / 2))
    return float(np.log(counts.sum()) - (counts * terms).sum() / counts.sum())


def chao_shen(counts: np.ndarray) -> float:
    """Chao and Shen 2003: shares reduced by the coverage, each weighted by its chance to be met."""
    counts = counts[counts > 0]
    n, once = counts.sum(), min((counts == 1).sum(), counts.sum() - 1)
    shares = (1 - once / n) * counts / n
    return float(-(shares * np.log(shares) / (1 - (1 - shares) ** n)).sum())


ESTIMATORS = {
    "plain": plain,
    "Miller–Madow": miller_madow,
    "Grassberger": grassberger,
    "Chao–Shen": chao_shen,
    "Chao–Wang–Jost": chao_wang_jost,
}


@dataclass(frozen=True)
class Row:
    """One line of the table: errors in nats at one size of the sample."""

    rms: dict[str, float]
    known: float
    worst: float

    def __str__(self) -> str:
        errors = " | ".join(f"{error:.3f}" for error in self.rms.values())
        worst = f"{self.worst:.3f}" if self.known else "–"
        return f"{errors} | {self.known:.0%} | {worst}"


def measured(ids: np.ndarray, batches: int, dice: np.random.Generator) -> Row:
    """Errors over `REPEATS` samples, fewer of large ones."""
    size = int(ids.max()) + 1
    truth = plain(np.bincount(ids))
    errors: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    accepted: list[float] = []
    repeats = max(4, min(REPEATS, REPEATS * 64 // batches))
    for _ in range(repeats):
        starts = dice.integers(0, len(ids) - LENGTH, size=ROWS * batches)
        sample = [ids[start : start + LENGTH] for start in starts]
        counts = np.bincount(np.concatenate(sample), minlength=size)
        for name, function in ESTIMATORS.items():
            errors[name].append(function(counts) - truth)
        if len(sample) >= 16 and (found := estimate(sample)).error <= LARGEST_ERROR:
            accepted.append(abs(found.value - truth))
    rms = {name: float(np.sqrt(np.mean(np.square(each)))) for name, each in errors.items()}
    return Row(rms, len(accepted) / repeats, max(accepted, default=0.0))


def table(texts: dict[str, str]) -> Iterator[str]:
    """Lines of the Markdown table."""
    yield f"| text | tokens | batches | {' | '.join(ESTIMATORS)} | known | largest error |"
    yield "|---|---|---:" + "|---:" * (len(ESTIMATORS) + 2) + "|"
    for name, text in texts.items():
        for kind, tokens in TOKENS.items():
            _, ids = np.unique(np.array(tokens(text)), return_inverse=True)
            for batches in BATCHES:
                if ROWS * LENGTH * batches < len(ids):
                    row = measured(ids, batches, np.random.default_rng(batches))
                    yield f"| {name} | {kind} | {batches} | {row} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="further texts, UTF-8")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in parser.parse_args().files}
    source = standard_library()
    library = bytes(source.read(0, len(source)).tolist()).decode(errors="replace")
    own = {"library source": library, "Python's help": "".join(topics.values())}
    for line in table(texts | own):
        print(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
