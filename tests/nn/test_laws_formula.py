"""Every scheme equals its formula: references.py, on the dense branches of dense.py."""

import dataclasses
from functools import partial

import dense
import pytest
import torch
from laws import ids_of, unsettled
from references import REFERENCES, Sub

from normscope.nn import SCHEMES
from normscope.nn.language_model import LanguageModel


def subs_of(model: LanguageModel) -> list[Sub]:
    found: list[Sub] = []
    for l, block in enumerate(model.blocks, start=1):  # noqa: E741
        for kind, (branch, residual) in block.sublayers().items():
            run = dense.attention if kind == "attention" else dense.feed_forward
            norms = [
                partial(dense.norm, residual.norms[slot]) for slot in ("branch_in", "branch_out", "stream")
            ]
            i = len(found) + 1
            found.append(Sub(l, len(model.blocks), i, kind, partial(run, branch), *norms, residual.join))
    return found


def test_no_scheme_is_without_a_reference() -> None:
    assert set(REFERENCES) == set(SCHEMES)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_a_scheme_is_its_formula(name: str) -> None:
    """The comparison detects a mistake: a branch whose features are in another order."""
    model = unsettled(name)
    ids = ids_of(1, 4)
    x = model.embedding(ids, torch.arange(4)[None])
    ends = [partial(dense.norm, norm) for norm in (model.entry_norm, model.final_norm)]
    subs, logits = subs_of(model), model(ids).logits
    torch.testing.assert_close(logits, model.head(REFERENCES[name](subs, x, *ends)), rtol=1e-9, atol=1e-9)
    subs[1] = dataclasses.replace(subs[1], F=lambda x, f=subs[1].F: f(x).roll(1, -1))
    wrong = model.head(REFERENCES[name](subs, x, *ends))
    assert not torch.allclose(logits, wrong, rtol=1e-6, atol=1e-6)
