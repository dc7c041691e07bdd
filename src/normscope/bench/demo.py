"""The effect in two minutes: one model that will train and one that will not, read, measured and judged."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from normscope.pipeline import Progress, check
from normscope.report import Report
from normscope.subjects import load


@dataclass(frozen=True)
class Case:
    """One model of the demo, with the run its user intends."""

    title: str
    model: str
    optimizer: str
    lr: float

    @property
    def command(self) -> str:
        """What to type for the same report."""
        return f"normscope check {self.model} --optimizer {self.optimizer} --lr {self.lr:g}"


CASES = (
    Case("GPT-2, 12 layers, random weights", "hf:gpt2", "adamw", 3e-4),
    Case(
        "nn.TransformerEncoder, 12 layers, Post-LN and Xavier weights as nn.Transformer gives them",
        "normscope.bench.examples:post_ln",
        "adam",
        1e-3,
    ),
)


def run(
    show: Callable[[Case, Report, Path], None],
    folder: Path,
    progress: Progress | None = None,
    cases: tuple[Case, ...] = CASES,
) -> None:
    """Check each case, write its page into `folder`, and hand it to `show`."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        report = check(load(case.model), optimizer=case.optimizer, lr=case.lr, progress=progress)
        page = folder / f"{case.model.split(':')[-1]}.html"
        report.to_html(page)
        show(case, report, page)
