"""The page of a training run: verdict, loss beside the unigram entropy, learning rate, gradient norm."""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from normscope.report.figures.charts import Curve, Picture, about_marks, chart, is_log
from normscope.report.figures.scales import figure
from normscope.report.html import sentence
from normscope.report.page import environment, style_sheet
from normscope.report.words import criterion_in_words
from normscope.subjects.targets import batch_entropy
from normscope.train import Run
from normscope.train.criterion import CRITERION_STEPS
from normscope.train.summary import Summary

MOST_POINTS = 150
"""Points of a line; of a longer run each is the mean of a stretch of steps."""
MOST_BATCHES = 256
"""Training batches whose unigram entropy is taken, the first of the run."""
CLASSES = {"trained": "fine", "not yet trained": "warning", "did not train": "error"}


def render_train_page(summary: Summary, versions: Mapping[str, str]) -> str:
    """The page of a run, one self-contained file without a script; every word in it is escaped.

    Args:
        summary: summary of the run.
        versions: of the software that trained it, by name.
    """
    run = summary.run
    outcome = "interrupted" if run.interrupted else run.outcome or "finished"
    page = (
        environment("normscope.report")
        .get_template("train.html")
        .render(
            summary=summary,
            run=run,
            style=Markup(style_sheet("page.css")),
            outcome=sentence(outcome).rstrip("."),
            lead=sentence(summary.verdict().removeprefix(f"{outcome}: ")),
            tone="halted" if run.interrupted else CLASSES.get(outcome, "untried"),
            loss=loss_chart(run),
            pictures=[rate_chart(run), *norm_charts(run)] if run.trial.losses else [],
            resume=resume_command(run),
            config={name: value for name, value in run.config.to_dict().items() if value is not None},
            versions=", ".join(f"{name} {version}" for name, version in versions.items()),
            criterion=criterion_in_words("Trained", run.subject.unigram_entropy),
            criterion_steps=CRITERION_STEPS,
        )
    )
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def resume_command(run: Run) -> str:
    """The shell command that continues a run; "" for a run without a folder."""
    return "" if run.folder is None else shlex.join(["normscope", "train", str(run.folder.path), "--resume"])


def loss_chart(run: Run) -> Picture | None:
    """Training and validation loss by step, beside the unigram entropy of the batches trained on."""
    losses = run.trial.losses
    if not losses:
        return None
    curves = [Curve("training", "c-a", *stretches(losses))]
    if run.validations:
        steps, values = zip(*run.validations, strict=True)
        curves.append(Curve("validation", "c-ink", [float(step) for step in steps], values))
    width = _stretch(losses)
    about = (
        f"In nats. Each point of the training loss is the mean of {width} steps. "
        if width > 1
        else "In nats. "
    )
    known, text = entropies(run), run.subject.unigram_entropy
    level = None
    if known:
        level = (sum(known) / len(known), "unigram")
        first = "" if len(known) == _num_batches(run) else f"first {len(known)} "
        about += f"Dashed: mean unigram entropy of the {first}training batches, {figure(level[0], 3)}. "
        about += f"The verdict compares with that of the whole text, {figure(text, 3)}."
    elif text is not None:
        level = (text, "unigram")
        about += "Dashed: unigram entropy of the text."
    log = is_log(losses)
    about += (" Log axis." if log else "") + about_marks(curves)
    drawing = chart(curves, label="Loss by step", x_label="step", log=log, level=level, dots=False)
    return Picture("Loss", about, drawing)


def rate_chart(run: Run) -> Picture:
    """Learning rate by step."""
    rates = [run.figures(step)["lr"] for step in range(len(run.trial.losses))]
    curve = Curve("", "c-ink", *stretches(rates))
    drawing = chart([curve], label="Learning rate by step", x_label="step", log=False, dots=False)
    return Picture("Learning rate", "With warm-up and schedule.", drawing)


def norm_charts(run: Run) -> list[Picture]:
    """Gradient norm by step, where it was kept."""
    norms = run.trial.gradient_norms
    if not any(math.isfinite(norm) for norm in norms):
        return []
    clip = run.config.trial.clip
    curve = Curve("", "c-ink", *stretches(norms))
    level = None if clip is None else (clip, "clip")
    label = "Gradient norm by step"
    drawing = chart([curve], label=label, x_label="step", log=True, dots=False, level=level)
    about = "L2 norm of all gradients together, before clipping. Log axis." + about_marks([curve])
    return [Picture("Gradient norm", about, drawing)]


def stretches(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Last step and mean of each stretch, at most `MOST_POINTS`."""
    width = _stretch(values)
    parts = [values[start : start + width] for start in range(0, len(values), width)]
    ends = itertools.accumulate(len(part) for part in parts)
    return [float(end) for end in ends], [sum(part) / len(part) for part in parts]


def _stretch(values: Sequence[float]) -> int:
    return max(1, -(-len(values) // MOST_POINTS))


def _num_batches(run: Run) -> int:
    return run.trial.step * run.config.trial.accumulation


def entropies(run: Run) -> list[float]:
    """Unigram entropy of each of the first training batches; empty where that of the text is unknown."""
    if run.subject.unigram_entropy is None:
        return []
    batches = itertools.islice(run.subject.batches(), min(MOST_BATCHES, _num_batches(run)))
    return [entropy for entropy in map(batch_entropy, batches) if entropy is not None]
