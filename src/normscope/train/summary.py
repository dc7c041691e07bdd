"""Summary of a finished run, as JSON and as text."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.train.criterion import CRITERION_STEPS, LAST, MARGIN, last_loss
from normscope.train.finish import Sample
from normscope.train.run import Run

SCHEMA = "normscope.train/1"


@dataclass(frozen=True)
class Summary:
    """Summary of a finished run.

    Attributes:
        run: the run.
        model: path of its trained model; None if the run was interrupted.
        sample: a prompt and the model's continuation; None if it generates no text.
        page: path of the run's HTML page; None if none was written.
    """

    run: Run
    model: Path | None = None
    sample: Sample | None = None
    page: Path | None = None

    @property
    def written(self) -> Sample | None:
        """The sample, or None if there is none or it failed."""
        return None if self.sample is None or self.sample.failure else self.sample

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the reader: notes of subject and run, and why a sample failed."""
        failure = None if self.sample is None else self.sample.failure
        return (*self.run.subject.notes, *self.run.notes, *([f"no sample: {failure}"] if failure else []))

    def to_dict(self) -> dict[str, Any]:
        """Mapping for JSON; a figure that is not finite is null."""
        run, trial = self.run, self.run.trial
        step, validation = run.validations[-1] if run.validations else (None, math.nan)
        return {
            "schema": SCHEMA,
            "model": run.config.model,
            "input": run.subject.input,
            "config": run.config.to_dict(),
            "steps": trial.step,
            "interrupted": run.interrupted,
            "resumed_at": run.began_at or None,
            "trained": run.trained,
            "outcome": run.outcome,
            "loss": _finite(last_loss(trial.losses)),
            "first_loss": _finite(trial.losses[0]) if trial.losses else None,
            "unigram_entropy": run.subject.unigram_entropy,
            "validation": {"step": step, "loss": _finite(validation)} if step is not None else None,
            "tokens_per_second": run.tokens_per_second,
            "folder": None if run.folder is None else str(run.folder.path),
            "page": None if self.page is None else str(self.page),
            "trained_model": None if self.model is None else str(self.model),
            "sample": None
            if self.written is None
            else {"prompt": self.written.prompt, "text": self.written.text},
            "notes": list(self.notes),
        }

    def verdict(self) -> str:
        """The first line."""
        run, trial = self.run, self.run.trial
        loss, entropy = last_loss(trial.losses), run.subject.unigram_entropy
        if not trial.losses:
            return "no step was taken"
        if run.interrupted:
            return f"interrupted after {trial.step} of {run.config.trial.steps} steps: the loss is {loss:.4g}"
        if not math.isfinite(loss):
            return f"did not train: the loss is not finite after {trial.step} steps"
        ends = f"the loss ends at {loss:.4g} (mean of the last {min(LAST, len(trial.losses))} steps)"
        if entropy is None:
            return f"{ends}; it began at {trial.losses[0]:.4g}"
        where = f"{abs(entropy - loss):.3g} nats {'below' if loss < entropy else 'above'} the unigram entropy"
        need = "" if run.trained else f"; the criterion is {MARGIN} below it after {CRITERION_STEPS} steps"
        return f"{run.outcome}: {ends}, {where} of {entropy:.4g}{need}"

    def lines(self) -> list[tuple[str, str]]:
        """Lines below the headline, each a name and a text."""
        run, found = self.run, self.to_dict()
        lines = [("model", run.config.model), ("input", run.subject.input)]
        since = f", from the checkpoint of step {run.began_at}" if run.began_at else ""
        lines.append(("steps", f"{run.trial.step} of {run.config.trial.steps}{since}"))
        if found["validation"] is not None:
            loss = found["validation"]["loss"]
            words = "not finite" if loss is None else f"{loss:.4g}"
            lines.append(("validation", f"{words} after {found['validation']['step']} steps"))
        if found["tokens_per_second"] is not None:
            lines.append(("speed", f"{found['tokens_per_second']:,.0f} tokens per second"))
        if run.folder is not None:
            lines.append(("folder", str(run.folder.path)))
        if self.page is not None:
            lines.append(("page", str(self.page)))
        if self.model is not None:
            lines.append(("weights", str(self.model)))
        if self.written is not None:
            lines += [("prompt", repr(self.written.prompt)), ("generates", repr(self.written.text))]
        return lines + [("note", note) for note in self.notes]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
