"""What the texts print as code or formula, written anew as modules, and small models made of it.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, read_anatomy

WIDTH, HEADS, VOCAB, BATCH, TOKENS, DEPTH = 32, 2, 64, 2, 12, 2

Map = Callable[[Tensor], Tensor]
Update = Callable[[Tensor, Map, Map], Tensor]
"""`update(x, sublayer, norm)` → the next x. Dropout, which all of them print, is off in what is read."""


def norm_of_sum(x: Tensor, sublayer: Map, norm: Map) -> Tensor:
    """`self.norm(x + self.dropout(sublayer(x)))`."""
    return norm(x + sublayer(x))


def norm_inside(x: Tensor, sublayer: Map, norm: Map) -> Tensor:
    """`x + self.dropout(sublayer(self.norm(x)))`."""
    return x + sublayer(norm(x))


def norm_of_output(x: Tensor, sublayer: Map, norm: Map) -> Tensor:
    """`x + Dropout(LayerNorm(Sublayer(x)))`."""
    return x + norm(sublayer(x))


@dataclass(frozen=True)
class Printed:
    """A snippet or a formula under a name.

    Attributes:
        text, where: the place.
        label: what the text calls it, in the words of a reading: "post" or "pre".
        update: what it prints.
    """

    text: str
    where: str
    label: str
    update: Update


SNIPPETS = (
    Printed("004", "§3.1, class SublayerWrapper", "post", norm_of_sum),
    Printed("004", "§3.2, class SublayerWrapper", "post", norm_inside),
    Printed("004", "§3.3, class SublayerConnection", "post", norm_inside),
    Printed("004", "§3.4, Input -> SubLayer -> LN -> Add", "post", norm_of_output),
    Printed("004", "§4.2, class SublayerConnection", "post", norm_inside),
    Printed("004", "§4.3, class SublayerConnection", "post", norm_inside),
    Printed("004", "§4.2, plan one", "post", norm_inside),
    Printed("004", "§5.1.1, Post-Norm", "post", norm_of_sum),
    Printed("004", "§5.2.1, Post-Norm", "post", norm_inside),
    Printed("004", "§8.3, Post-LN", "post", norm_of_output),
    Printed("004", "§3.4, Input -> LN -> SubLayer -> Add", "pre", norm_inside),
    Printed("004", "§4.2, plan two", "pre", norm_of_output),
    Printed("004", "§5.1.1, Pre-Norm", "pre", norm_inside),
    Printed("004", "§5.3.1, Pre-Norm", "pre", norm_inside),
    Printed("004", "§8.3, Pre-LN", "pre", norm_inside),
    Printed("000", "Definition 1.3", "post", norm_of_sum),
    Printed("000", "Definition 1.4", "pre", norm_inside),
    Printed("001", "§1, Post-LN", "post", norm_of_sum),
    Printed("001", "§1, Pre-LN", "pre", norm_inside),
    Printed("002", "Post-Norm", "post", norm_of_sum),
    Printed("002", "Pre-Norm", "pre", norm_inside),
    Printed("003", "§1", "pre", norm_inside),
)
"""Every place that prints a placement under its name."""


class SelfAttention(nn.Module):
    """torch's attention of x to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        return self.attention(x_BTD, x_BTD, x_BTD, need_weights=False)[0]


class PrintedBlock(nn.Module):
    """Attention and feed-forward, each joined to the stream by `update`."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update = update
        self.attention = SelfAttention()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        x_BTD = self.update(x_BTD, self.attention, self.norm1)
        return self.update(x_BTD, self.feed_forward, self.norm2)


class PreLNDecoderBlock(nn.Module):
    """003 §4, letter for letter; `norm` is what it says may be swapped for `nn.RMSNorm`."""

    def __init__(self, d_model: int, n_heads: int, norm: Callable[..., nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm1 = norm(d_model, eps=1e-6)
        self.mha = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm2 = norm(d_model, eps=1e-6)
        self.ffn = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        x = x + self.mha(self.norm1(x), self.norm1(x), self.norm1(x), attn_mask=mask)[0]
        return x + self.ffn(self.norm2(x))


class TransformerBlock(nn.Module):
    """004 §4.3, letter for letter but for the number of heads, which is 8 there."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, num_heads=num_heads)
        self.ffn = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, d_model))
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        norm_x = self.norm1(x)
        attn_out, _ = self.attn(norm_x, norm_x, norm_x)
        x = x + attn_out
        norm_x = self.norm2(x)
        ffn_out = self.ffn(norm_x)
        return x + ffn_out


class PrintedModel(nn.Module):
    """An embedding, blocks, a head: nothing that the text does not print stands between them."""

    def __init__(self, blocks: list[nn.Module], *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCAB)

    def stream(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D), through the blocks; with the mask of 003 where they take one."""
        tokens = x_BTD.shape[1]
        masks = [torch.ones(tokens, tokens, dtype=torch.bool).triu(1)] * self.causal
        for block in self.blocks:
            x_BTD = block(x_BTD, *masks)
        return x_BTD

    def forward(self, ids_BT: Tensor) -> Tensor:
        """(B, T) → (B, T, V)."""
        return self.head(self.stream(self.embedding(ids_BT)))


def model_of(printed: Printed, seed: int) -> PrintedModel:
    """A stack of the snippet, in eval mode."""
    torch.manual_seed(seed)
    return PrintedModel([PrintedBlock(printed.update) for _ in range(DEPTH)]).eval()


def read(model: nn.Module) -> Anatomy:
    """What the anatomy says of it."""
    return read_anatomy(model, torch.randint(VOCAB, (BATCH, TOKENS)))


def torch_block(block: PrintedBlock, label: str) -> nn.TransformerEncoderLayer:
    """torch's own block of the placement `label`, with the weights of `block`."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=label == "pre"
    )
    names = {"self_attn": block.attention.attention, "norm1": block.norm1, "norm2": block.norm2}
    names |= {"linear1": block.feed_forward[0], "linear2": block.feed_forward[2]}
    for name, module in names.items():
        getattr(layer, name).load_state_dict(module.state_dict())
    return layer.eval()
