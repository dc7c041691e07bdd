"""Code and formulas that the texts print as Post-LN and as Pre-LN, written anew as modules and read.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, read_anatomy
from normscope.claims.experiments import calls_of, distance
from normscope.claims.form import Case, Evidence, Figure, Setup, claim
from normscope.claims.readings import in_words, placement_of

WIDTH, HEADS, VOCAB, BATCH, TOKENS, DEPTH = 32, 2, 64, 2, 12, 2

Map = Callable[[Tensor], Tensor]
Update = Callable[[Tensor, Map, Map], Tensor]
"""`update(x, sublayer, norm)` → the next x. Dropout, which all of them print, is off in what is read."""

UPDATES: Mapping[str, Update] = {
    "norm of the sum": lambda x, sublayer, norm: norm(x + sublayer(x)),
    "norm inside": lambda x, sublayer, norm: x + sublayer(norm(x)),
    "norm of the output": lambda x, sublayer, norm: x + norm(sublayer(x)),
}
"""The three that are printed: norm(x + dropout(sublayer(x))) and so on."""


class Printed(NamedTuple):
    """A snippet or a formula at a place of a text, which calls it "post" or "pre" (`label`)."""

    text: str
    where: str
    label: str
    update: str


SNIPPETS = (
    Printed("004", "§3.1, class SublayerWrapper", "post", "norm of the sum"),
    Printed("004", "§3.2, class SublayerWrapper", "post", "norm inside"),
    Printed("004", "§3.3, class SublayerConnection", "post", "norm inside"),
    Printed("004", "§3.4, Input -> SubLayer -> LN -> Add", "post", "norm of the output"),
    Printed("004", "§4.2, class SublayerConnection", "post", "norm inside"),
    Printed("004", "§4.3, class SublayerConnection", "post", "norm inside"),
    Printed("004", "§4.2, plan one", "post", "norm inside"),
    Printed("004", "§5.1.1, Post-Norm", "post", "norm of the sum"),
    Printed("004", "§5.2.1, Post-Norm", "post", "norm inside"),
    Printed("004", "§8.3, Post-LN", "post", "norm of the output"),
    Printed("004", "§3.4, Input -> LN -> SubLayer -> Add", "pre", "norm inside"),
    Printed("004", "§4.2, plan two", "pre", "norm of the output"),
    Printed("004", "§5.1.1, Pre-Norm", "pre", "norm inside"),
    Printed("004", "§5.3.1, Pre-Norm", "pre", "norm inside"),
    Printed("004", "§8.3, Pre-LN", "pre", "norm inside"),
    Printed("000", "Definition 1.3", "post", "norm of the sum"),
    Printed("000", "Definition 1.4", "pre", "norm inside"),
    Printed("001", "§1, Post-LN", "post", "norm of the sum"),
    Printed("001", "§1, Pre-LN", "pre", "norm inside"),
    Printed("002", "Post-Norm", "post", "norm of the sum"),
    Printed("002", "Pre-Norm", "pre", "norm inside"),
    Printed("003", "§1", "pre", "norm inside"),
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
    return PrintedModel([PrintedBlock(UPDATES[printed.update]) for _ in range(DEPTH)]).eval()


def read(model: nn.Module) -> Anatomy:
    """The anatomy's reading of a model."""
    return read_anatomy(model, torch.randint(VOCAB, (BATCH, TOKENS)))


def torch_block(block: PrintedBlock, label: str) -> nn.TransformerEncoderLayer:
    """torch's own block of the placement `label`, with the weights of `block`."""
    how = {"dropout": 0.0, "batch_first": True, "norm_first": label == "pre"}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **how)  # type: ignore[arg-type]
    names = {"self_attn": block.attention.attention, "norm1": block.norm1, "norm2": block.norm2}
    names |= {"linear1": block.feed_forward[0], "linear2": block.feed_forward[2]}
    for name, module in names.items():
        getattr(layer, name).load_state_dict(module.state_dict())
    return layer.eval()


SAME = 1e-5
"""Largest relative distance of two outputs that float32 explains."""


@claim("C7")
def labelled_post(setup: Setup) -> Evidence:
    """Small models of every snippet, read; and their outputs beside those of torch's blocks."""
    cases = [_snippet_case(printed) for printed in SNIPPETS]
    read_as = Counter(case.at["read"] for case in cases if not case.part)
    agree = sum(case.holds == (case.value <= SAME) for case in cases)
    return Evidence(
        cases,
        Figure.share("% of the places labelled Post-LN that are", cases),
        notes=[
            f"Labelled Post-LN: {', '.join(f'{n} are {kind}' for kind, n in read_as.items())}.",
            f"torch's blocks say the same as the anatomy in {agree} of {len(cases)} cases.",
        ],
    )


def _snippet_case(printed: Printed) -> Case:
    model = model_of(printed, 0)
    found = placement_of(read(model))
    x_BTD = torch.randn(BATCH, TOKENS, WIDTH)
    by_torch = nn.Sequential(*(torch_block(block, printed.label) for block in model.blocks))  # type: ignore[arg-type]
    far = distance(model.stream(x_BTD), by_torch(x_BTD))
    part = "others" if printed.text != "004" else "" if printed.label == "post" else "pre"
    where = f"{printed.text} {printed.where} is {found}, its distance from {printed.label} of torch"
    return Case(None, where, far, found == printed.label, part, at={"read": found})


@claim("B18")
def templates(setup: Setup) -> Evidence:
    """Both templates: read, counted, and fed a batch of which one sequence is changed."""
    cases = [case for name in TEMPLATES for case in _template_cases(name)]
    counts = {name: _norm_calls(name) for name in TEMPLATES}
    return Evidence(
        cases,
        Figure.share("% of the templates that are Pre-LN", cases),
        notes=[
            f"{name} calls its norms {n} times a forward, for two branches." for name, n in counts.items()
        ],
    )


TEMPLATES: dict[str, Callable[[], nn.Module]] = {
    "003, PreLNDecoderBlock": lambda: PreLNDecoderBlock(WIDTH, HEADS),
    "003 with nn.RMSNorm": lambda: PreLNDecoderBlock(WIDTH, HEADS, nn.RMSNorm),
    "004, TransformerBlock": lambda: TransformerBlock(WIDTH, HEADS),
}


def _template(name: str) -> PrintedModel:
    torch.manual_seed(0)
    blocks = {each: [draw() for _ in range(DEPTH)] for each, draw in TEMPLATES.items()}
    return PrintedModel(blocks[name], causal=name.startswith("003")).eval()


def _template_cases(name: str) -> Iterator[Case]:
    model = _template(name)
    anatomy = read(model)
    where, pre = f"{name}: {in_words(anatomy)}", placement_of(anatomy) == "pre"
    if name.endswith("nn.RMSNorm"):
        rms = pre and all(branch.norm == "rmsnorm" for branch in anatomy.branches)
        yield Case(None, where, float(rms), rms, "rms")
        return
    yield Case(None, where, float(pre), pre)
    yield Case(None, name, float(anatomy.final_norm), anatomy.final_norm, "final")
    if name.startswith("004"):
        where = f"{name}, change of the other sequences"
        yield Case.at_most(None, where, _seen_by_others(model), SAME, "batch")


@torch.no_grad()
def _seen_by_others(model: PrintedModel) -> float:
    """Relative change of the other outputs when the first sequence of a batch is another."""
    x_BTD = torch.randn(TOKENS, TOKENS, WIDTH)  # as many sequences as tokens: 003's mask fits either way
    other_BTD = torch.cat((torch.randn(1, TOKENS, WIDTH), x_BTD[1:]))
    return distance(model.stream(other_BTD)[1:], model.stream(x_BTD)[1:])


def _norm_calls(name: str) -> float:
    """Calls of norms in a forward, a block."""
    model = _template(name)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    with torch.no_grad(), calls_of(norms) as calls:
        model.stream(torch.randn(BATCH, TOKENS, WIDTH))
    return len(calls) / DEPTH
