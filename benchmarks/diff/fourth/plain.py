"""Plain refactorings of four models: other names, wrappers, fused or split projections, other order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.diff.fourth.base import VOCABULARY, State, renamed
from benchmarks.diff.fourth.gpt import LAYERS, LENGTH, WIDTH, Block, GPTConfig, NanoGPT, linear
from benchmarks.diff.fourth.llama import (
    GROUPS,
    HEADS,
    HIDDEN,
    OPTIONS,
    SIZE,
    MetaLlama,
    RMSNorm,
    apply_rotary_emb,
    published,
    repeat_kv,
    to_meta,
)
from benchmarks.diff.fourth.llama import WIDTH as D

Carry = Callable[[State], State]


def config() -> GPTConfig:
    """nanoGPT's configuration."""
    return GPTConfig()


class Wrapped(nn.Module):
    """A model under another name that returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NanoGPT(config())

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(input_ids)}


class WithLoss(NanoGPT):
    """A model that returns the logits and a loss, which is None without targets."""

    def __init__(self) -> None:
        super().__init__(config())

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        logits = super().forward(idx)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Output:
    """Output of a model."""

    logits: Tensor
    loss: Tensor | None = None


class Typed(NanoGPT):
    """A model that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__(config())

    def forward(self, idx: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(idx))


class Hooked(NanoGPT):
    """A model whose layers note the size of the stream by hooks."""

    def __init__(self) -> None:
        super().__init__(config())
        self.sizes: list[float] = []
        for block in self.transformer["h"].children():
            block.register_forward_hook(self.note)

    def note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Note the size of an output."""
        self.sizes.append(float(output.detach().norm()))


class Checkpointed(NanoGPT):
    """A model that computes its layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__(config())

    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"].children():
            x = checkpoint(block, x, use_reentrant=False)
        return F.linear(self.transformer["ln_f"](x), self.lm_head.weight)


class Dead(NanoGPT):
    """A model with parameters that nothing reads any more."""

    def __init__(self) -> None:
        super().__init__(config())
        self.temperature = nn.Parameter(torch.ones(1))
        self.old_head = nn.Linear(WIDTH, 7)


class Renamed(nn.Module):
    """A model with other names, one-hot products for its tables and a Sequential of layers."""

    def __init__(self) -> None:
        super().__init__()
        plan = config()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.words = nn.Parameter(torch.empty(VOCABULARY, WIDTH).normal_(std=0.02))
        self.head.weight = self.words
        self.places = nn.Parameter(torch.empty(LENGTH, WIDTH).normal_(std=0.02))
        self.body = nn.Sequential(*(Block(plan) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        for name, parameter in self.body.named_parameters():
            if parameter.dim() == 2:
                far = (2 * LAYERS) ** 0.5 if "c_proj" in name else 1.0
                nn.init.normal_(parameter, std=0.02 / far)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        one_hot = F.one_hot(tokens, VOCABULARY).to(self.words.dtype)
        places = torch.eye(LENGTH, dtype=self.words.dtype)[: tokens.shape[1]] @ self.places
        return self.head(self.body(one_hot @ self.words + places))


class Split(nn.Module):
    """Layer with three projections, q scaled beforehand, and sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        names = ("query", "key", "value", "merge")
        self.attend = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                far = (2 * LAYERS) ** 0.5 if "merge" in name or "narrow" in name else 1.0
                nn.init.normal_(parameter, std=0.02 / far)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (
            self.attend[name](y).unflatten(-1, (4, 8)).transpose(1, 2) for name in ("query", "key", "value")
        )
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = ((q / 8**0.5) @ k.mT).masked_fill(~allowed, -torch.inf).softmax(-1)
        y = self.attend["merge"]((scores @ v).transpose(1, 2).flatten(2))
        y += x
        z = self.narrow(F.gelu(self.widen(self.between(y)), approximate="tanh"))
        z += y
        return z


class SplitGPT(nn.Module):
    """A model of layers with three projections, in a dictionary by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {"word": nn.Embedding(VOCABULARY, WIDTH), "place": nn.Embedding(LENGTH, WIDTH)}
        )
        self.stack = nn.ModuleDict({f"layer_{i}": Split() for i in range(LAYERS)})
        self.norm = nn.LayerNorm(WIDTH)
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.02)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tables["word"](tokens) + self.tables["place"](torch.arange(tokens.shape[1]))
        for layer in self.stack.values():
            x = layer(x)
        return self.norm(x) @ self.tables["word"].weight.T


def under(prefix: str) -> Carry:
    """nanoGPT's weights below a prefix."""
    return lambda state: {f"{prefix}{key}": value for key, value in linear(state).items()}


def with_dead(state: State) -> State:
    """nanoGPT's weights with what nothing reads."""
    old = nn.Linear(WIDTH, 7)
    more = {"old_head.weight": old.weight.detach(), "old_head.bias": old.bias.detach()}
    return linear(state) | more | {"temperature": torch.ones(1)}


def to_renamed(state: State) -> State:
    """The weights with other names."""
    return renamed(
        linear(state),
        (r"^transformer\.wte\.weight", "words"),
        (r"^transformer\.wpe\.weight", "places"),
        (r"^transformer\.h", "body"),
        (r"^transformer\.ln_f", f"body.{LAYERS}"),
        (r"^lm_head", "head"),
    )


def to_split(state: State) -> State:
    """The weights of three projections."""
    made = renamed(
        linear(state),
        (r"^transformer\.wte", "tables.word"),
        (r"^transformer\.wpe", "tables.place"),
        (r"^transformer\.h\.", "stack.layer_"),
        (r"^transformer\.ln_f", "norm"),
        ("ln_1", "before"),
        ("ln_2", "between"),
        (r"attn\.c_proj", "attend.merge"),
        (r"mlp\.c_fc", "widen"),
        (r"mlp\.c_proj", "narrow"),
        drop="lm_head",
    )
    for key in [key for key in made if "c_attn" in key]:
        for name, part in zip(("query", "key", "value"), made.pop(key).chunk(3), strict=True):
            made[key.replace("attn.c_attn", f"attend.{name}")] = part
    return made


class LlamaSubclass(MetaLlama):
    """Meta's model, made by keywords, with the head drawn first and no cast of the logits."""

    def __init__(self, *, eps: float = 1e-6, theta: float = 10000.0) -> None:
        super().__init__({**OPTIONS, "eps": eps, "theta": theta})
        drawn = nn.Linear(D, VOCABULARY, bias=False)
        del self.output
        self.output = drawn


class FusedLayer(nn.Module):
    """Layer with one projection for keys and values, and one for gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = RMSNorm(D), RMSNorm(D)
        self.q, self.kv = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * GROUPS * SIZE, bias=False)
        self.o = nn.Linear(D, D, bias=False)
        self.gate_up, self.down = nn.Linear(D, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
        turns = torch.polar(torch.ones_like(angles), angles)
        y = self.norm_a(x)
        q = self.q(y).unflatten(-1, (HEADS, SIZE))
        k, v = self.kv(y).unflatten(-1, (2, GROUPS, SIZE)).unbind(2)
        q, k = (apply_rotary_emb(t, turns, "pairs") for t in (q, k))
        k, v = (repeat_kv(t, HEADS // GROUPS) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_b(x)).tensor_split(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class FusedLlama(nn.Module):
    """LLaMA of fused layers that need nothing but the stream."""

    def __init__(self) -> None:
        super().__init__()
        norm, head = RMSNorm(D), nn.Linear(D, VOCABULARY, bias=False)
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, D), FusedLayer(), FusedLayer(), norm, head)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


def to_fused(state: State) -> State:
    """The weights of the fused layers."""
    made = renamed(
        to_meta(state),
        ("^tok_embeddings", "net.0"),
        (r"^layers\.1", "net.2"),
        (r"^layers\.0", "net.1"),
        ("^norm", "net.3"),
        ("^output", "net.4"),
        ("attention_norm", "norm_a"),
        ("ffn_norm", "norm_b"),
        (r"attention\.w([qo])", r"\1"),
        (r"feed_forward\.w2", "down"),
    )
    for i in (1, 2):
        kv = [made.pop(f"net.{i}.attention.w{part}.weight") for part in "kv"]
        made[f"net.{i}.kv.weight"] = torch.cat(kv)
        pair = [made.pop(f"net.{i}.feed_forward.w{part}.weight") for part in "13"]
        made[f"net.{i}.gate_up.weight"] = torch.cat(pair)
    return made


class Trainer(nn.Module):
    """The published LLaMA in a wrapper that also computes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = published("llama")

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = self.net(input_ids=input_ids, use_cache=False).logits
        if labels is None:
            return (logits,)
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def below(prefix: str) -> Carry:
    """The published weights below a prefix."""
    return lambda state: {f"{prefix}{key}": value for key, value in state.items()}


PLAIN_GPT: dict[str, tuple[Callable[..., nn.Module], Carry]] = {
    "wrapper with a dict": (Wrapped, under("model.")),
    "logits and loss": (WithLoss, linear),
    "dataclass": (Typed, linear),
    "hooks": (Hooked, linear),
    "checkpointing": (Checkpointed, linear),
    "dead parameters": (Dead, with_dead),
    "other names and one-hot tables": (Renamed, to_renamed),
    "split projections": (SplitGPT, to_split),
}
"""Refactorings of the model in nanoGPT's style."""
PLAIN_LLAMA: dict[str, tuple[Callable[..., nn.Module], Carry]] = {
    "subclass, head first": (LlamaSubclass, to_meta),
    "fused layers in a Sequential": (FusedLlama, to_fused),
    "wrapper with a loss": (Trainer, below("net.")),
}
"""Refactorings of LLaMA."""
