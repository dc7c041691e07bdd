"""`normscope.check`: effects and errors of its options."""

import json

import jsonschema
import pytest
import torch
from small_models import MODELS, Sublayers, pre
from torch import nn

import normscope
from benchmarks.broken import TimesBackward
from normscope.schemas import schema
from normscope.train import recipe_in_words


@pytest.mark.parametrize("select", ["NS103", ["NS103"], ("identical-blocks", "NS6")])
def test_select_takes_one_code_or_several(select: str | list[str]) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # nn.TransformerEncoder copies it
    model = nn.Sequential(nn.Embedding(256, 16), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False))
    batch = torch.randint(0, 256, (2, 16))
    found = normscope.check(model, batch, steps=0, budget="fast").findings
    assert len(found) > 1
    report = normscope.check(model, batch, steps=0, budget="fast", select=select)
    assert [finding.code for finding in report.findings] == ["NS103"]
    rest = normscope.check(model, batch, steps=0, budget="fast", ignore=select).findings
    assert rest == tuple(finding for finding in found if finding.code != "NS103")


@pytest.mark.parametrize(
    ("dtype", "precision", "words"),
    [
        (torch.bfloat16, "float32", "no clipping · bfloat16 weights"),
        (torch.float32, "float32", "no clipping · float32"),
        (torch.float64, "bfloat16", "no clipping · bfloat16"),
    ],
)
def test_the_recipe_names_the_type_of_the_weights(dtype: torch.dtype, precision: str, words: str) -> None:
    model, batch = MODELS["pre"]().to(dtype), torch.randint(0, 256, (2, 16))
    report = normscope.check(model, batch, steps=1, precision=precision, budget="fast")
    assert report.recipe is not None
    assert recipe_in_words(report.recipe).endswith(words)
    jsonschema.validate(json.loads(report.to_json()), schema("report"))


@pytest.mark.parametrize("option", ["select", "ignore"])
def test_an_unknown_code_is_refused(option: str) -> None:
    with pytest.raises(normscope.UsageError, match="NS999"):
        normscope.check(MODELS["pre"](), torch.randint(0, 256, (2, 16)), **{option: ["NS999"]})


def test_a_subject_brings_its_own_batch() -> None:
    subject = normscope.load("nn:decoder,depth=1,width=32")
    with pytest.raises(normscope.UsageError, match="either a Subject, or a module"):
        normscope.check(subject, torch.zeros(1))


def test_a_broken_weight_that_the_batch_never_meets_is_named() -> None:
    model = MODELS["pre"]()
    batch = torch.randint(1, 256, (2, 16))
    with torch.no_grad():
        model.embedding.weight[0, 0] = float("inf")
    report = normscope.check(model, batch, steps=0)
    assert [(f.name, f.sites) for f in report.findings if f.severity == "error"] == [
        ("non-finite", ("embedding.weight",))
    ]


def test_a_block_with_a_wrong_backward_is_found_and_its_right_twin_is_not() -> None:
    torch.manual_seed(0)
    model, batch = Sublayers(pre), torch.randint(0, 256, (2, 8))
    assert normscope.check(model, batch, steps=0, budget="fast").findings == ()
    model.blocks[1].join = lambda x, branch, norm: x + TimesBackward.apply(branch(norm(x)), 0.5)
    report = normscope.check(model, batch, steps=0, budget="fast")
    (finding,) = report.findings
    assert (finding.code, finding.severity, report.verdict) == ("NS304", "warning", "at risk")
    assert len(finding.sites) == 1
    assert finding.sites[0].startswith("blocks.1.")
    assert [row.value for row in finding.evidence] == [pytest.approx(0.5, abs=0.01)]


def test_quantise_adds_its_probe_and_no_other_check_has_it() -> None:
    model, batch = MODELS["pre"](), torch.randint(0, 256, (2, 16))
    stages: list[tuple[str, int, int]] = []
    report = normscope.check(
        model,
        batch,
        steps=0,
        budget="fast",
        quantise=["fp8", "int8"],
        progress=lambda *stage: stages.append(stage),
    )
    names = {row.quantity for row in report.measurements}
    assert {"quantisation/stream-int8-tensor-rank", "quantisation/stream-fp8-channel-rank"} <= names
    assert not any("int4" in name for name in names)
    assert "quantisation" in report.cost
    assert [done for _, done, _ in stages] == sorted(done for _, done, _ in stages)
    assert stages[-1][1] == stages[-1][2]
    plain = normscope.check(model, batch, steps=0, budget="fast")
    assert not any(row.quantity.startswith("quantisation/") for row in plain.measurements)
    assert plain.findings == report.findings, "no finding rests on it"


def test_an_unknown_format_is_refused_before_the_work() -> None:
    with pytest.raises(normscope.UsageError, match='the nearest name is "int8"'):
        normscope.check(nn.Identity(), quantise="int88")
