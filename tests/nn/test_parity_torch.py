"""`Block` equals `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` in outputs and gradients."""

import pytest
import torch
from parity import Part, assert_parity
from torch import nn

from normscope.nn import Block, Context, ModelConfig, Where

D, H, HIDDEN, B, T, S = 16, 4, 40, 3, 7, 5
ATTENTION = {
    "attention.q": Part("self_attn.in_proj_*", third=0),
    "attention.k": Part("self_attn.in_proj_*", third=1),
    "attention.v": Part("self_attn.in_proj_*", third=2),
    "attention.o": "self_attn.out_proj.*",
}
CROSS = {
    "cross.q": Part("multihead_attn.in_proj_*", third=0),
    "cross.k": Part("multihead_attn.in_proj_*", third=1),
    "cross.v": Part("multihead_attn.in_proj_*", third=2),
    "cross.o": "multihead_attn.out_proj.*",
}
FEED_FORWARD = {"feed_forward.up": "linear1.*", "feed_forward.down": "linear2.*"}
REAL_BT = torch.arange(T) < torch.tensor([7, 4, 1])[:, None]
REAL_BS = torch.arange(S) < torch.tensor([2, 5, 3])[:, None]
LATER_TT = torch.ones(T, T, dtype=torch.bool).triu(1)

orders = pytest.mark.parametrize("norm_first", [False, True])
masks = pytest.mark.parametrize("padded", [False, True])
causality = pytest.mark.parametrize("causal", [False, True])
activations = pytest.mark.parametrize("activation", ["relu", "gelu"])
precisions = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["float32", "float64"]
)


def _norms(norm_first: bool, *residuals: str) -> dict[str, str]:
    slot = "branch_in" if norm_first else "stream"
    return {
        f"{name}_residual.norms.{slot}": f"norm{index}.*" for index, name in enumerate(residuals, start=1)
    }


def _block(norm_first: bool, activation: str, dtype: torch.dtype, *, causal: bool, cross: bool) -> Block:
    scheme = "pre" if norm_first else "post"
    config = ModelConfig(scheme=scheme, width=D, heads=H, hidden=HIDDEN, activation=activation)
    return Block(config, Where(1), causal=causal, cross=cross).to(dtype)


@orders
@causality
@masks
@activations
@precisions
def test_encoder_layer(
    norm_first: bool, causal: bool, padded: bool, activation: str, dtype: torch.dtype, tolerance: float
) -> None:
    theirs = nn.TransformerEncoderLayer(
        D, H, HIDDEN, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first, dtype=dtype
    )
    ours = _block(norm_first, activation, dtype, causal=causal, cross=False)
    context = Context(mask=REAL_BT[:, None, None, :] if padded else None)
    assert_parity(
        ours,
        theirs,
        ATTENTION | FEED_FORWARD | _norms(norm_first, "attention", "feed_forward"),
        lambda x: ours(x, context),
        lambda x: theirs(x, LATER_TT if causal else None, ~REAL_BT if padded else None),
        [torch.randn(B, T, D, dtype=dtype)],
        tolerance,
    )


@orders
@causality
@masks
@activations
@precisions
def test_decoder_layer(
    norm_first: bool, causal: bool, padded: bool, activation: str, dtype: torch.dtype, tolerance: float
) -> None:
    theirs = nn.TransformerDecoderLayer(
        D, H, HIDDEN, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first, dtype=dtype
    )
    ours = _block(norm_first, activation, dtype, causal=causal, cross=True)
    padding = (REAL_BT[:, None, None, :], REAL_BS[:, None, None, :]) if padded else (None, None)
    their_padding = (~REAL_BT, ~REAL_BS) if padded else (None, None)
    assert_parity(
        ours,
        theirs,
        ATTENTION | CROSS | FEED_FORWARD | _norms(norm_first, "attention", "cross", "feed_forward"),
        lambda x, memory: ours(x, Context(mask=padding[0], memory=memory, memory_mask=padding[1])),
        lambda x, memory: theirs(x, memory, LATER_TT if causal else None, None, *their_padding),
        [torch.randn(B, T, D, dtype=dtype), torch.randn(B, S, D, dtype=dtype)],
        tolerance,
    )
