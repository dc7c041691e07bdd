"""A real run that goes wrong late by itself: its alarm comes before its loss moves."""

from dataclasses import replace
from pathlib import Path

from benchmarks.monitor.late_runs import KINDS, judged, losses, moved, train

STEPS, SEED = 300, 0


def test_attention_collapses_long_before_the_loss_moves(tmp_path: Path) -> None:
    """Queries and keys learn 100 times as fast; the twin has QK-norm. See benchmarks/monitor/late_runs.py."""
    kind = KINDS["logits"]
    stores = [tmp_path / f"{name}.db" for name in ("fails", "twin")]
    for setting, store in zip((kind.fails, kind.healthy), stores, strict=True):
        train(replace(setting, steps=STEPS), SEED, None, store)
    step = moved(*map(losses, stores), behind=False)
    alarms = [at for at, finding in judged(stores[0]) if finding.code in kind.codes]
    assert step is not None
    assert alarms
    assert step - alarms[0] >= 50, (step, alarms)
    assert not [at for at, finding in judged(stores[1]) if finding.code in kind.codes]
