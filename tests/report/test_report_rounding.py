"""The report of the quantisation probe: the first places, outlier channels, the other placement."""

from dataclasses import replace

import pytest
from handmade_reports import report

from normscope.probes import Measurement, Measurements, not_measured
from normscope.report import text_report
from normscope.report.rounding import first_ranked, outliers_in_words, placement_in_words, rounding_in_words


def place(
    part: str, site: str, rank: float, change: float | None, name: str = "int8-tensor"
) -> list[Measurement]:
    begin = f"quantisation/{part}-{name}"
    harm = (
        not_measured(f"{begin}-harm", site, "…")
        if change is None
        else Measurement(f"{begin}-harm", site, change)
    )
    return [
        Measurement(f"{begin}-sqnr", site, 40.0 + rank, "dB"),
        harm,
        Measurement(f"{begin}-loss-change", site, 1e-3 * rank),
        Measurement(f"{begin}-rank", site, rank),
    ]


ROWS = [
    *place("weights", "layers.0.mlp", 4.0, None),
    *place("stream", "layers.1", 1.0, 0.0123),
    *place("norm", "layers.1.ln", 1.0, 0.0123),  # Post-LN: the same tensor
    *place("norm", "layers.0.ln", 2.0, 0.01),
    *place("branch", "layers.0.mlp", 3.0, None),
    *place("stream", "layers.0", 1.0, 0.5, "fp8-channel"),
]


def test_the_first_places_each_tensor_once() -> None:
    shown = [row.cells for row in first_ranked(Measurements(ROWS))]
    assert shown == [
        ("int8 per tensor", "stream layers.1", "41.0", "1.23 %", "+0.001"),
        ("int8 per tensor", "norm layers.0.ln", "42.0", "1 %", "+0.002"),
        ("int8 per tensor", "branch layers.0.mlp", "43.0", "–", "+0.003"),
        ("fp8 per channel", "stream layers.0", "41.0", "50 %", "+0.001"),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_stands_in_the_terminals_report_and_fits(width: int) -> None:
    rows = Measurements([*report().measurements, *ROWS])
    text = text_report(replace(report(), measurements=rows), width)
    assert max(map(len, text.splitlines())) <= width
    assert "stream layers.1 " in text
    assert "outlier no channel reaches 6 × the median channel" in text
    assert "rounded alone" not in text_report(report(), width)


def test_outliers_are_named_with_their_channels() -> None:
    channels = "quantisation/stream-outlier-channels"
    rows = [
        Measurement(channels, "layers.0", ()),
        Measurement(channels, "layers.1", (3.0, 17.0)),
        Measurement(channels, "layers.2", (3.0, 17.0)),
        Measurement("quantisation/norm-outlier-channels", "final", tuple(map(float, range(11)))),
        Measurement("quantisation/stream-outlier-ratio", "layers.0", 3.0),
        Measurement("quantisation/stream-outlier-ratio", "layers.1", 25.0),
    ]
    assert outliers_in_words(Measurements(rows)) == (
        "at least 6 × the median channel: stream channels 3, 17 in layers.1…layers.2; norm channels 0, 1, 2, "
        "3, 4, 5, 6, 7 and 3 more in final; largest ratio in the stream 25"
    )


def test_the_other_placement_is_measured_or_estimated() -> None:
    whole, other = (
        "quantisation/stream-int8-tensor-together",
        "quantisation/counterpart-stream-int8-tensor-together",
    )
    gains = [
        Measurement("quantisation/norm-int8-tensor-gain", site, gain)
        for site, gain in (("a", 1.0), ("b", -2.0))
    ]
    rows = [Measurement(whole, "", 0.02), *gains]
    assert placement_in_words(Measurements(rows), "int8-tensor") == (
        "the whole stream, int8 per tensor: the output changes by 2 %; the SQNR of a norm's output is -0.5 "
        "dB against its input's (median; -2.0 … +1.0), an estimate of what storing normed values would change"
    )
    counterpart = Measurement(
        other, "", 0.01, how="exact; the same model with scheme post, same config and weights"
    )
    assert placement_in_words(Measurements([*rows, counterpart]), "int8-tensor").endswith(
        "; 1 % in the same model with scheme post, same config and weights"
    )
    assert placement_in_words(Measurements([not_measured(whole, "", "…")]), "int8-tensor") == ""


def test_a_probe_that_failed_says_nothing_here() -> None:
    assert list(rounding_in_words(Measurements([not_measured("quantisation/all", "", "RuntimeError")]))) == []
    assert list(rounding_in_words(Measurements([]))) == []
