"""`normscope.check`: what its options do and refuse."""

import pytest
import torch
from small_models import MODELS
from torch import nn

import normscope


@pytest.mark.parametrize("select", ["NS103", ["NS103"], ("identical-blocks", "NS6")])
def test_select_takes_one_code_or_several(select: str | list[str]) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # nn.TransformerEncoder copies it
    model = nn.Sequential(nn.Embedding(256, 16), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False))
    batch = torch.randint(0, 256, (2, 16))
    found = normscope.check(model, batch, steps=0).findings
    assert len(found) > 1
    report = normscope.check(model, batch, steps=0, select=select)
    assert [finding.code for finding in report.findings] == ["NS103"]
    rest = normscope.check(model, batch, steps=0, ignore=select).findings
    assert rest == tuple(finding for finding in found if finding.code != "NS103")


@pytest.mark.parametrize("option", ["select", "ignore"])
def test_an_unknown_code_is_refused(option: str) -> None:
    with pytest.raises(normscope.UsageError, match="NS999"):
        normscope.check(MODELS["pre"](), torch.randint(0, 256, (2, 16)), **{option: ["NS999"]})


def test_a_subject_brings_its_own_batch() -> None:
    subject = normscope.load("nn:decoder,depth=1,width=32")
    with pytest.raises(normscope.UsageError, match="one or the other"):
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
