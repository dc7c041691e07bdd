"""The stream at the start, and what scales it."""

import pytest

from normscope.claims import CLAIMS, Setup, Verdict, measure_claim, start_stream
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.at_start import noise, slope, stack_of, stream_by_block, variance
from normscope.claims.catalogue import SCHEMES
from normscope.claims.start_stream import holds_stream


def test_slope_of_a_power() -> None:
    assert slope((1, 2, 4), (3, 12, 48)) == pytest.approx(2)


def test_variance_is_over_features() -> None:
    assert variance(noise(512, 0)) == pytest.approx(1, abs=0.1)
    assert variance(noise(512, 0) + 5) == pytest.approx(1, abs=0.1)


def test_stream_of_several_streams() -> None:
    streams = stream_by_block(stack_of("hyper-connections", 2, 0, width=16), noise(16, 0))
    assert [x.shape for x in streams] == [(4, 16, 16)] * 3


def test_stream_of_pre_ln_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_stream, "train_changed", lambda setup, config: {})
    tested = measure_claim(CLAIMS["B6"], Setup(seeds=(0,)))
    assert tested.judgement.verdict is Verdict.HOLDS
    assert tested.parts["law"].verdict is Verdict.HOLDS
    assert tested.evidence.figure is not None
    assert 16 < tested.evidence.figure.value < 49


def test_who_holds_the_stream() -> None:
    held = {name for name in SCHEMES if holds_stream(name)}
    assert {"post", "deepnorm", "admin", "b2t"} <= held
    assert not held & {"pre", "peri", "res-post", "keel", "mix-ln", "residual-dual", "siamesenorm"}


def test_only_a_norm_on_the_stream_keeps_its_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_stream, "SCHEMES", {name: SCHEMES[name] for name in ("post", "pre", "plain")})
    monkeypatch.setattr(start_stream, "PLAIN_SCHEMES", ("post", "plain"))
    tested = measure_claim(CLAIMS["C8"], Setup(seeds=(0,)))
    assert tested.judgement.verdict is Verdict.CONDITION
    assert tested.parts["hundred"].verdict is Verdict.HOLDS
    assert {
        case.where for case in tested.evidence.cases if case.met and not case.part and not case.fresh
    } == {"post, its own weights"}


def test_either_root_keeps_the_variance_by_depth() -> None:
    tested = measure_claim(CLAIMS["C15"], Setup(seeds=(0,)))
    assert tested.judgement.verdict is Verdict.REFUTED
    assert tested.parts["depth"].verdict is Verdict.HOLDS
    assert tested.parts["one"].verdict is Verdict.REFUTED
    assert tested.parts["gradient"].verdict is Verdict.HOLDS
    ends = {case.where: case.value for case in tested.evidence.cases if case.part == "one"}
    assert 1 < ends["N = 2L branches, 64 blocks"] < ends["N = L layers, 64 blocks"] < 2
