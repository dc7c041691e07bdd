"""Verdicts about operations and memory (C21, C22), counted again in plain torch without normscope."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

VOCAB, BATCH, TOKENS, HEADS = 256, 2, 64, 4


class PlainBlock(nn.Module):
    """A Pre-LN block: attention written out, and a feed-forward of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.qkv(self.norms[0](x_BTD)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(nn.functional.gelu(self.up(self.norms[1](x_BTD))))


class PlainDecoder(nn.Module):
    """Embeddings, blocks, a norm and a head; each block whose number `again` divides is run again."""

    def __init__(self, depth: int, width: int, again: int = 0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList([PlainBlock(width) for _ in range(depth)])
        self.norm, self.head, self.again = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False), again

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(ids_BT) + self.positions.weight
        for number, block in enumerate(self.blocks, start=1):
            if self.again and number % self.again == 0:
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
            else:
                x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT.flatten())


def operations(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def kept_bytes(model: PlainDecoder, ids_BT: Tensor) -> int:
    """Bytes of the storages that the forward pass keeps, without the parameters and the ids."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), ids_BT)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = model(ids_BT)
    assert held.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(("depth", "width"), [(2, 128), (6, 64)])
def test_c21_half_of_the_blocks_run_again_save_and_cost_as_the_text_says(depth: int, width: int) -> None:
    ids_BT = torch.randint(VOCAB, (BATCH, TOKENS))
    plain, half = PlainDecoder(depth, width), PlainDecoder(depth, width, again=2)
    forward = operations(lambda: plain(ids_BT))
    step = operations(lambda: plain(ids_BT).backward())
    saved = 1 - kept_bytes(half, ids_BT) / kept_bytes(plain, ids_BT)
    more = (operations(lambda: half(ids_BT).backward()) - step) / forward
    assert 0.4 <= saved <= 0.5
    assert 0.2 <= more <= 0.4
    with set_checkpoint_early_stop(False):
        whole = (operations(lambda: half(ids_BT).backward()) - step) / forward
    assert whole > more + 0.08, "the last map of a block is not run again unless it is asked for"


@pytest.mark.parametrize("width", [64, 256])
def test_c22_norms_and_adds_are_under_one_per_cent_of_a_step(width: int) -> None:
    model, ids_BT = PlainDecoder(4, width), torch.randint(VOCAB, (BATCH, TOKENS))
    step, rows = operations(lambda: model(ids_BT).backward()), BATCH * TOKENS
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    # forward: mean, difference, variance, scale, γ, β: 8 an element; backward: 11 (two sums, γ's and β's)
    normed, adds = len(norms) * rows * width * (8 + 11), 2 * 2 * 4 * rows * width
    own, whole = (sum(p.numel() for p in each.parameters()) for each in (nn.ModuleList(norms), model))
    assert own / whole < 0.01
    assert (normed + adds) / step < 0.01
