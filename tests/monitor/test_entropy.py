"""The entropy of the targets, which a monitor finds by itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normscope.cli.main import run
from normscope.forecast.entropy import estimate, estimate_of_counts
from normscope.monitor import Monitor, RunReader
from normscope.monitor.alarms import Judges
from normscope.monitor.entropy import TargetsEntropy
from normscope.subjects import load

VOCAB, TOKENS = 24, 40
SHARES = 1 / np.arange(1, VOCAB + 1) ** 1.5
SHARES = SHARES / SHARES.sum()
ENTROPY = float(-(SHARES * np.log(SHARES)).sum())


def text(seed: int, rows: int = 8) -> Tensor:
    drawn = np.random.default_rng(seed).choice(VOCAB, size=(rows, TOKENS + 1), p=SHARES)
    return torch.from_numpy(drawn)


def shifted_inside(model: Any, ids: Tensor) -> Tensor:
    logits, *_ = model(ids[:, :-1])
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:-1].flatten())


def labels_apart(model: Any, ids: Tensor) -> Tensor:
    logits, *_ = model(ids[:, :-1])
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * 3.0


def half_masked(model: Any, ids: Tensor) -> Tensor:
    logits, *_ = model(ids[:, :-1])
    labels = ids[:, 1:].masked_fill(torch.arange(TOKENS) % 2 == 0, -100)
    return cross_entropy(logits.transpose(1, 2), labels)


def smoothed(model: Any, ids: Tensor) -> Tensor:
    """A loss with label smoothing, of half the batch, as with an accumulation."""
    logits, *_ = model(ids[:, :-1])
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1) / 2


def squares(model: Any, ids: Tensor) -> Tensor:
    logits, *_ = model(ids[:, :-1])
    return (logits - 1.0).square().mean()


def noted(path: Path, loss_of: Any, batches: Any, steps: int = 34, **options: Any) -> dict[str, Any]:
    model = load(f"nn:decoder,scheme=pre,depth=1,width=16,heads=2,vocab={VOCAB}").model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer, store=path, **options) as monitor:
        for step in range(steps):
            loss = loss_of(model, batches(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    assert monitor.failure is None, monitor.failure
    with RunReader(path) as reader:
        return reader.notes()


@pytest.mark.parametrize("loss_of", [shifted_inside, labels_apart, half_masked])
def test_the_entropy_of_the_targets_is_found(loss_of: Any, tmp_path: Path) -> None:
    notes = noted(tmp_path / "run.db", loss_of, text)
    assert notes["entropy"] == pytest.approx(ENTROPY, abs=0.05)
    assert notes["facts"]["entropy"] == notes["entropy"], "the loss is judged with it"


def test_the_entropy_is_that_of_smoothed_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = noted(path := tmp_path / "run.db", smoothed, text)
    shares = 0.9 * SHARES + 0.1 / VOCAB
    expected = -float((shares * np.log(shares)).sum())
    assert expected > ENTROPY + 0.15
    assert notes["entropy"] == notes["facts"]["entropy"] == pytest.approx(expected, abs=0.05)
    assert notes["smoothing"] == pytest.approx(0.1, abs=0.005)
    run(["check", str(path)])
    assert "with the loss's label smoothing of 0.1" in " ".join(capsys.readouterr().out.split())


def test_equal_logits_delay_the_entropy() -> None:
    """They do not show label smoothing; where they stay equal, the loss is at ln V with it or without."""
    found, values = TargetsEntropy(), []
    for step in range(256):
        logits, ids = torch.zeros(8, TOKENS, VOCAB, requires_grad=True), text(step)
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        assert logits.grad is not None
        rows = [(logits.detach()[0], logits.grad[0])]
        values.append(found.see([logits.grad], (ids[:, :-1],), rows))
    assert values[:-1] == [None] * 255
    assert values[-1] == pytest.approx(ENTROPY, abs=0.05)


def test_a_run_that_ends_before_its_logits_differ_says_so() -> None:
    logits, ids = torch.zeros(8, TOKENS, VOCAB, requires_grad=True), text(0)
    cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert logits.grad is not None
    found = TargetsEntropy()
    assert found.see([logits.grad], (ids[:, :-1],), [(logits.detach()[0], logits.grad[0])]) is None
    found.close()
    assert found.reason == "the logits of 1 step do not show whether the loss has label smoothing"


def test_a_given_entropy_is_kept(tmp_path: Path) -> None:
    assert noted(tmp_path / "run.db", labels_apart, text, entropy=7.0)["entropy"] == 7.0


def test_a_loss_that_is_no_cross_entropy_has_none(tmp_path: Path) -> None:
    notes = noted(tmp_path / "run.db", squares, text)
    assert notes["entropy"] is None
    assert "no cross-entropy" in notes["entropy-unknown"]


def test_random_ids_have_none(tmp_path: Path) -> None:
    notes = noted(tmp_path / "run.db", labels_apart, lambda step: torch.randint(0, VOCAB, (8, TOKENS + 1)))
    assert notes["entropy"] is None
    assert "random" in notes["entropy-unknown"]


def test_too_few_targets_are_no_estimate(tmp_path: Path) -> None:
    notes = noted(tmp_path / "run.db", labels_apart, lambda step: text(step, rows=1)[:, :9])
    assert notes["entropy"] is None
    assert "too few" in notes["entropy-unknown"]


def test_few_targets_of_many_steps_are_enough(tmp_path: Path) -> None:
    """With 32 targets a step, 34 steps are too few, and 256 are enough."""
    found = [
        noted(tmp_path / f"{steps}.db", labels_apart, lambda step: text(step, rows=4)[:, :9], steps=steps)
        for steps in (34, 256)
    ]
    assert found[0]["entropy"] is None
    assert found[0]["entropy-unknown"] == "the targets of 34 steps are too few to estimate it"
    assert found[1]["entropy"] == pytest.approx(ENTROPY, abs=0.1)


def test_counts_step_by_step_give_the_estimate_of_all_sequences() -> None:
    found, seen, rng = TargetsEntropy(), [], np.random.default_rng(0)
    for step in range(20):
        rows = [rng.choice(5 + step, size=7) for _ in range(3)]
        seen += rows
        found._count(rows)
    counts = found._counts[:, found._counts.any(axis=0)]
    assert estimate_of_counts(counts) == estimate(seen)


def test_an_entropy_that_stays_unknown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.db"
    notes = noted(path, labels_apart, lambda step: text(step, rows=1)[:, :2], steps=260)
    assert notes["entropy-unknown"] == "the targets of 256 steps are too few to estimate it"
    run(["check", str(path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "entropy of the targets unknown (the targets of 256 steps are too few to estimate it)" in said
    assert "so NS809 was not judged" in said


def test_losses_count_from_before_the_entropy_is_known() -> None:
    facts: dict[str, Any] = {}
    judges, layout = Judges(facts), (("loss", ""),)
    rng, found = np.random.default_rng(0), []
    for step in range(1, 131):
        if step == 121:
            facts["entropy"] = 6.0
        found += [each.code for each in judges.feed(step, layout, np.array([6.0 + 0.01 * rng.normal()]))]
    assert found == ["NS809"]


def test_classes_of_samples_are_targets(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    model, rng = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3)), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer, store=path) as monitor:
        for _ in range(34):
            labels = torch.from_numpy(rng.choice(3, size=128, p=[0.8, 0.1, 0.1]))
            loss = cross_entropy(model(torch.randn(128, 8)), labels)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    with RunReader(path) as reader:
        expected = -(0.8 * np.log(0.8) + 0.2 * np.log(0.1))
        assert reader.notes()["entropy"] == pytest.approx(expected, abs=0.05)
