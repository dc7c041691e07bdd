"""Tests that figures by depth at initialisation match the papers; three seeds each."""

import pytest
import torch

from benchmarks.slopes import CLAIMS, ENTRIES, Claim, at_entry, exponent, measured
from normscope.nn import SCHEMES, build

DEEP = [claim for claim in CLAIMS if "at its entry" not in claim.what]


@pytest.mark.parametrize("claim", DEEP, ids=[claim.what for claim in DEEP])
def test_a_claim_lies_in_its_interval(claim: Claim) -> None:
    assert claim.low <= measured(claim) <= claim.high


def test_the_exponent_of_a_power() -> None:
    assert exponent(lambda depth: 3 * depth**-0.5) == pytest.approx(-0.5)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_the_stream_enters_at_the_scale_of_the_source(name: str) -> None:
    rms, _ = at_entry(name, seed=3)
    assert rms == pytest.approx(ENTRIES[name][0], rel=0.05)


@pytest.mark.parametrize("name", ["peri", "pre", "siamesenorm", "residual-dual", "hyper-connections"])
def test_the_ends_of_a_stack_can_be_asked_for(name: str) -> None:
    options = {"depth": 1, "width": 16, "heads": 2, "vocab": 11}
    both = build("decoder", scheme=name, entry_norm=True, final_norm=True, **options)
    none = build("decoder", scheme=name, entry_norm=False, final_norm=False, **options)
    assert {"entry_norm.weight", "final_norm.weight"} <= both.state_dict().keys()
    assert not {"entry_norm.weight", "final_norm.weight"} & none.state_dict().keys()
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))
    none.load_state_dict(both.state_dict(), strict=False)
    assert not torch.allclose(both(ids).logits, none(ids).logits)


def test_padding_has_no_part_in_the_norm_at_the_entry() -> None:
    """A norm over tokens uses only the statistics of real tokens."""
    model = build("encoder", scheme="peri", norm="batchnorm", depth=1, width=8, heads=1, vocab=11).train()
    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    other = torch.where(mask == 1, ids, (ids + 3) % 11)
    before, after = (model(each, attention_mask=mask).logits[mask == 1] for each in (ids, other))
    torch.testing.assert_close(before, after)
