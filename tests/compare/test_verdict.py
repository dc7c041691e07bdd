"""Verdicts: what two reports say differently, and what only seeds say."""

import copy
from typing import Any

import pytest

from normscope.compare.verdict import compare

Report = dict[str, Any]


def measurement(quantity: str, site: str, value: Any) -> Report:
    return {"quantity": quantity, "site": site, "value": value, "unit": "", "how": "exact"}


def finding(code: str, name: str, severity: str = "warning", *sites: str) -> Report:
    return {"code": code, "name": name, "severity": severity, "sites": list(sites), "message": "It is so."}


def report(prefix: str = "layers", factor: float = 1.0, **changes: Any) -> Report:
    blocks = [
        {
            "path": f"{prefix}.{n}",
            "call": 0,
            "branches": [
                {
                    "kind": "attention",
                    "placement": "pre",
                    "norm": "layernorm",
                    "path": f"{prefix}.{n}.attn",
                    "join": "add",
                    "stream_scale": None,
                    "branch_scale": None,
                    "scheme": None,
                }
            ],
        }
        for n in range(4)
    ]
    stack = {"name": "decoder", "blocks": blocks, "final_norm": True}
    return {
        "schema": "normscope.report/1",
        "anatomy": {"stacks": [stack], "blocks": blocks, "final_norm": True, "unread": []},
        "measurements": [
            *(measurement("stream/rms", f"{prefix}.{n}", factor * (n + 1.0)) for n in range(4)),
            *(measurement("gradient/q", f"{prefix}.{n}.attn", factor * 1e-3) for n in range(4)),
            measurement("wiring/first-loss", "", 5.5),
        ],
        "findings": [],
        "verdict": "healthy",
    } | changes


def test_a_report_and_itself_with_renamed_modules_do_not_differ() -> None:
    found = compare(report(), report("model.h"))
    assert found.differences == ()
    assert found.compared.how == "partly"
    assert "factor of 2" in found.compared.why[0]


@pytest.mark.parametrize(
    ("factor", "names"),
    [(1.9, []), (2.1, ["stream/rms"]), (4.1, ["stream/rms", "gradient/q"])],
)
def test_with_one_report_only_a_stated_effect_counts(factor: float, names: list[str]) -> None:
    found = compare(report(), report("model.h", factor)).differences
    assert [each.message.split()[0] for each in found] == names
    for each in found:
        assert len(each.sites) == 4
        assert each.sites[0][1] is not None
        assert each.sites[0][1].startswith("model.h.0")


def test_one_site_alone_needs_a_larger_effect() -> None:
    other = report()
    other["measurements"][2]["value"] *= 3
    assert compare(report(), other).differences == ()
    other["measurements"][2]["value"] *= 2
    (found,) = compare(report(), other).differences
    assert found.sites == (("layers.2", "layers.2"),)
    assert (found.a, found.b) == (3.0, 18.0)


def test_a_value_that_is_not_finite_differs_from_one_that_is() -> None:
    other = report()
    other["measurements"][0]["value"] = "nan"
    (found,) = compare(report(), other).differences
    assert found.name == "measurement"


def test_replicas_find_small_effects_and_no_noise() -> None:
    def replicas(factor: float) -> list[Report]:
        return [report(factor=factor * (1 + 0.01 * n)) for n in range(3)]

    assert compare(replicas(1.0), replicas(1.02)).differences == ()
    found = compare(replicas(1.0), replicas(1.3))
    assert found.compared.how == "whole"
    assert [each.name for each in found.differences] == ["measurement"] * 2


def test_findings_gained_lost_and_graver() -> None:
    a = report(
        findings=[
            finding("NS101", "post-ln-deep", "note"),
            finding("NS201", "stream-growth", "warning", "layers.1"),
        ]
    )
    b = report(
        findings=[finding("NS101", "post-ln-deep", "error"), finding("NS301", "gradient-vanish")],
        verdict="will fail",
    )
    found = compare(a, b).differences
    assert [each.name for each in found] == ["verdict", "finding-severity", "finding-lost", "finding-gained"]
    assert found[0].message == 'The verdict is "healthy" in A and "will fail" in B.'
    assert found[2].sites == (("layers.1", None),)


def test_two_runs_are_compared_by_verdict_findings_and_loss() -> None:
    def run(loss: float, verdict: str) -> Report:
        return {
            "schema": "normscope.run/1",
            "verdict": verdict,
            "findings": [],
            "figures": {"last_loss": loss, "best_loss": loss, "seconds": 3.0},
        }

    assert compare(run(2.0, "healthy"), run(2.2, "healthy")).differences == ()
    names = [each.name for each in compare(run(2.0, "healthy"), run(5.0, "failed")).differences]
    assert names == ["verdict", "measurement", "measurement"]
    mixed = compare(run(2.0, "healthy"), report())
    assert mixed.compared.how == "not"


def test_the_reports_are_not_changed() -> None:
    twice = [finding("NS101", "post-ln-deep", "note", "x"), finding("NS101", "post-ln-deep", "error", "y")]
    a = report(findings=twice)
    before = copy.deepcopy(a)
    compare(a, a)
    assert a == before
