"""Gates on the branch: what they do at the start, and runs whose results are known."""

from planted_runs import STANDS_STILL, TRAINS, TRAINS_WELL, judged

from normscope.claims import Verdict, zero_start
from normscope.train import RunConfig


def is_gated(config: RunConfig, names=tuple(zero_start.GATED)) -> bool:
    return any(f"scheme={name}," in config.model for name in names)


def test_it_helps_where_every_gate_is_ahead():
    found = judged("C29", lambda config: TRAINS_WELL if is_gated(config) else STANDS_STILL, (0, 1))
    assert found.parts["helps"].verdict is found.parts["post"].verdict is Verdict.HOLDS


def test_it_does_not_where_only_factors_are_ahead():
    factors = ("rezero", "layerscale")
    found = judged("C29", lambda config: TRAINS_WELL if is_gated(config, factors) else TRAINS, (0, 1))
    assert found.parts["helps"].verdict is Verdict.REFUTED
    assert [effect.where for effect in found.parts["helps"].effects if effect.holds] == [
        "rezero against residual-no-norm",
        "layerscale against pre",
    ]


def test_a_block_that_starts_as_the_identity_changes_nothing():
    assert zero_start.change("rezero", 8, 0) == 0
    assert 0 < zero_start.change("highway", 8, 0) < zero_start.change("residual-no-norm", 8, 0)
