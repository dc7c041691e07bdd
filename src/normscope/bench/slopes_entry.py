"""The RMS of the stream where it enters the first block, by scheme: measured, and as its source has it.

Weights and embedding are the scheme's own.
"""

import torch

from normscope.claims.at_start import BATCH, TOKENS, VOCAB, WIDTH
from normscope.nn import Block, Decoder, build


@torch.no_grad()
def at_entry(scheme: str, seed: int) -> tuple[float, float]:
    """RMS of the (first) stream at the entry of 4 blocks, and of what the first attention adds."""
    torch.manual_seed(seed)
    model = build("decoder", scheme=scheme, depth=4, width=WIDTH, heads=4, vocab=VOCAB, context=TOKENS)
    assert isinstance(model, Decoder)
    x_BTD = model.embedding(torch.randint(VOCAB, (BATCH, TOKENS)), torch.arange(TOKENS)[None])
    state, block = model.scheme.join.enter(x_BTD, model.entry_norm), model.blocks[0]
    assert isinstance(block, Block)
    added: list[torch.Tensor] = []
    block.attention_residual.norms["branch_out"].register_forward_hook(lambda *call: added.append(call[-1]))
    block(state)
    stream = state[0] if isinstance(state, tuple) else state
    stream = stream[..., 0, :] if stream.dim() == 4 else stream
    return tuple(float(x.square().mean().sqrt()) for x in (stream, added[0]))  # type: ignore[return-value]


NORMED = ("peri", "res-post", "swin-v2", "siamesenorm")
NORMAL = """
    pre pre-no-final gpt2 normformer layerscale mix-ln layernorm-scaling gpas hybridnorm keel parallel
    hyper-connections mhc dyt derf sigma-reparam depth-mup
"""
GLOROT = """
    plain residual-no-norm post deepnorm sub-ln admin rezero skipinit fixup residual-dual b2t gtrxl highway
    scalenorm
"""
OF_NORMAL, OF_GLOROT = "tokens and positions N(0, 0.02²)", "tokens and positions of variance 1/width"

ENTRIES: dict[str, tuple[float, str]] = {
    **dict.fromkeys(NORMED, (1.0, "the norm behind its embedding")),
    **dict.fromkeys(NORMAL.split(), (0.02 * 2**0.5, OF_NORMAL)),
    "olmo2": (0.02 * 2**0.5, f"{OF_NORMAL}, as in its code, which has no positions there and no norm"),
    **dict.fromkeys(GLOROT.split(), ((2 / WIDTH) ** 0.5, OF_GLOROT)),
    "t-fixup": ((2 / WIDTH) ** 0.5 * 36**-0.25, f"{OF_GLOROT}, × (9N)^-¼ of N = 4 blocks"),
    "ngpt": (WIDTH**-0.5, "unit length"),
    "unit-scaling": (2**0.5, "tokens and positions N(0, 1)"),
    "dslm": (1.0, "tokens and positions N(0, ½)"),
}
"""Scheme → RMS of the stream at its entry, by its source; and why."""
