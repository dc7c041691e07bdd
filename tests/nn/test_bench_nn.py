"""`bench nn` compares the same function in three models, and its rows state what was timed."""

import pytest
import torch
from parity import Table, copy_weights, under
from test_parity_hf import GPT2_BLOCK
from test_parity_torch import ATTENTION, FEED_FORWARD

from benchmarks import nn

ENCODER_BLOCK: Table = (
    ATTENTION
    | FEED_FORWARD
    | {
        "attention_residual.norms.branch_in": "norm1.*",
        "feed_forward_residual.norms.branch_in": "norm2.*",
    }
)
TABLES: dict[str, Table] = {
    "gpt2": {
        "embedding.tokens": "transformer.wte.*",
        "embedding.positions": "transformer.wpe.*",
        "final_norm": "transformer.ln_f.*",
        "head": "lm_head.*",
    }
    | under("blocks.0", "transformer.h.0", GPT2_BLOCK),
    "encoder": {
        "embedding.tokens": "tokens.*",
        "embedding.positions": "positions.*",
        "final_norm": "encoder.norm.*",
        "head": "head.*",
    }
    | under("blocks.0", "encoder.layers.0", ENCODER_BLOCK),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"DEPTH": 1, "WIDTH": 16, "HEADS": 2, "VOCAB": 11, "BATCH": 2, "TOKENS": 5}
    for name, value in sizes.items():
        monkeypatch.setattr(nn, name, value)


@pytest.mark.parametrize("rival", TABLES)
def test_the_rival_is_the_same_model(rival: str) -> None:
    ours, theirs = nn.MODELS["ours"](), nn.MODELS[rival]()
    copy_weights(ours, theirs, TABLES[rival])
    ids = torch.randint(11, (2, 5))
    output = theirs(ids)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    torch.testing.assert_close(ours(ids).logits, logits, rtol=1e-5, atol=1e-5)


def test_every_step_is_timed_and_every_rival_has_a_row() -> None:
    measured = nn.measure("eager", 3)
    assert measured["seconds"].keys() == {"ours", "gpt2", "encoder", "gpt2-as-it-comes"}
    assert all(len(steps) == 3 and min(steps) > 0 for steps in measured["seconds"].values())
    rows = nn._ratios("eager", measured)
    assert len(rows) == 3
    assert all(float(row["figure"]) > 0 for row in rows)


def test_the_figure_is_the_median_ratio_of_a_round() -> None:
    seconds = {"ours": [1.0, 2.0, 9.0], "gpt2": [2.0, 2.0, 10.0]}
    (row,) = nn._ratios("eager", {"seconds": seconds, "device": "cpu", "threads": 2, "allocator": "glibc"})
    assert row["figure"] == "0.90"
    assert "2000 ms against 2000 ms" in row["how"]
