"""`normscope bench nn`: normscope's decoder against the same model in other libraries.

A float32 AdamW training step of a 6-layer Pre-LN decoder (d = 384, 6 heads, GELU, 4 × 256 byte ids, no
dropout), in `normscope.nn`, in Hugging Face GPT-2 (SDPA) and in `nn.TransformerEncoder` (`norm_first`,
causal). All do the same computation on the same batch, in turns, so that a slow phase of the machine affects
all. The figure is the median over rounds of the ratio of two steps of a round. Compiled means `torch.compile`
with its defaults (Inductor), from an empty cache.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.process import (
    Row,
    circumstances,
    in_fresh_process,
    median_ms,
    median_ratio,
    row,
    seconds,
)
from normscope.nn import build

DEPTH, WIDTH, HEADS, VOCAB, BATCH, TOKENS = 6, 384, 6, 256, 4, 256
ROUNDS = 15
_TITLES = {
    "gpt2": "relative to Hugging Face GPT-2",
    "gpt2-as-it-comes": "relative to GPT-2 with its default gelu_new",
    "encoder": "relative to nn.TransformerEncoder",
}


def bench_nn() -> list[Row]:
    """Rows with figures and targets: eager and compiled, each from a new process."""
    eager = _ratios("eager", in_fresh_process(measure, "eager"))
    with tempfile.TemporaryDirectory() as empty:
        try:
            compiled = in_fresh_process(measure, "compiled", TORCHINDUCTOR_CACHE_DIR=empty)
        except RuntimeError as error:  # for example without a C++ compiler
            reason = str(error).strip().splitlines()[-1]
            return [*eager, row("compiled training steps", "not measured", "", reason)]
    first_s: dict[str, float] = compiled["first_s"]
    words = ", ".join(f"{name} {each:.0f} s" for name, each in first_s.items())
    first = row("first compiled step, compiling included", f"{first_s['ours']:.0f} s", "–", words)
    return [*eager, *_ratios("compiled", compiled), first]


def _ratios(mode: str, measured: dict[str, Any]) -> list[Row]:
    """A row for each rival: the time of our step divided by that of its step."""
    spent: dict[str, list[float]] = measured["seconds"]
    ours = spent.pop("ours")
    where = f"{measured['device']}, {measured['threads']} threads, {measured['allocator']}"
    rows = []
    for name, theirs in spent.items():
        figure, quartiles = median_ratio(ours, theirs)
        how = f"{quartiles}; medians {median_ms(ours)} against {median_ms(theirs)}; {where}"
        rows.append(row(f"{mode} training step of our decoder, {_TITLES[name]}", figure, "≤ 1.00", how))
    return rows


def _ours() -> nn.Module:
    return build("decoder", scheme="pre", depth=DEPTH, width=WIDTH, heads=HEADS, vocab=VOCAB, context=TOKENS)


def _gpt2(**options: Any) -> nn.Module:
    """Hugging Face's GPT-2 without its cache, which training does not need."""
    from transformers import GPT2Config, GPT2LMHeadModel

    options |= {"n_layer": DEPTH, "n_embd": WIDTH, "n_head": HEADS}
    options |= {"vocab_size": VOCAB, "n_positions": TOKENS}
    options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    options |= {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**options))


class _Encoder(nn.Module):
    """`nn.TransformerEncoder` as a decoder: embeddings, causal mask, final norm, head."""

    mask_TT: Tensor

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        mask_TT = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        self.register_buffer("mask_TT", mask_TT, persistent=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """(B, T) → (B, T, V)."""
        x_BTD = self.tokens(ids_BT) + self.positions.weight
        return self.head(self.encoder(x_BTD, mask=self.mask_TT, is_causal=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ours": _ours,
    "gpt2": lambda: _gpt2(activation_function="gelu"),
    "encoder": _Encoder,
}
ONLY_EAGER: dict[str, Callable[[], nn.Module]] = {"gpt2-as-it-comes": _gpt2}


def _training_step(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    """A training step with next-token cross-entropy, the same for all, and PyTorch's AdamW."""
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        optimizer.zero_grad()
        output = model(inputs)
        logits_BTV = output if isinstance(output, Tensor) else output.logits
        F.cross_entropy(logits_BTV.flatten(0, 1), labels).backward()
        optimizer.step()
        if inputs.is_cuda:
            torch.cuda.synchronize()

    return step


def measure(mode: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of each step of each model, and of the first step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (BATCH, TOKENS + 1), device=device)
    makers = MODELS | ONLY_EAGER if mode == "eager" else MODELS
    models = {name: make().to(device) for name, make in makers.items()}
    assert len({sum(p.numel() for p in model.parameters()) for model in models.values()}) == 1
    if mode == "compiled":
        for model in models.values():
            model.compile()
    steps = {name: _training_step(model, ids) for name, model in models.items()}
    first_s = {name: seconds(step).wall for name, step in steps.items()}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for _ in range(rounds):
        names = [*names[1:], names[0]]  # rotate, so that none is always first
        for name in names:
            spent[name].append(seconds(steps[name]).wall)
    return {"device": device, "seconds": spent, "first_s": first_s, **circumstances()}
