"""Mixtures of experts in two styles, and gated convolutions as in models without attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diff.families import State
from benchmarks.diff.third.base import Style, blocks, neighbours, renamed
from benchmarks.diff.third.encoders import initialised, styled
from benchmarks.diff.third.llama import EPS, KV, META, OUTER, D, H, MetaAttention, RMSNorm, T, V, W
from benchmarks.diff.third.llama import precompute_freqs_cis as rotations

L, EXPERTS, TOP, HIDDEN, KERNEL = 2, 4, 2, 72, 4


class Expert(nn.Module):
    """SwiGLU of one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(W, HIDDEN, bias=False), nn.Linear(W, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Mixture of experts by a loop over those that are chosen, as in mistral-inference."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.gate = nn.Linear(W, EXPERTS, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, W)
        weights, chosen = torch.topk(self.gate(flat), TOP)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(inputs.dtype)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, nth = torch.where(chosen == i)
            results[row] += weights[row, nth, None] * expert(flat[row])
        return results.view_as(inputs)


class Dense(nn.Module):
    """Mixture of experts in which all experts read all tokens, with weights of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(W, EXPERTS))
        self.gate, self.up = (
            nn.Parameter(torch.empty(EXPERTS, W, HIDDEN)),
            nn.Parameter(torch.empty(EXPERTS, W, HIDDEN)),
        )
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, W))

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router
        least = logits.topk(TOP, -1).values[..., -1:]
        shares = logits.masked_fill(logits < least, -torch.inf).softmax(-1)
        gate = torch.einsum("btd,edh->bteh", x, self.gate)
        up = torch.einsum("btd,edh->bteh", x, self.up)
        return torch.einsum("bteh,ehd,bte->btd", F.silu(gate) * up, self.down, shares)


class MixtureBlock(nn.Module):
    """Block of attention and a mixture."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = MetaAttention(""), mixture
        self.attention_norm, self.ffn_norm = RMSNorm(W, EPS), RMSNorm(W, EPS)

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), freqs, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Mixture(nn.Module):
    """Mixtral in the style of Mistral's code."""

    freqs_cis: Tensor

    def __init__(self, slip: str = "", kind: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(V, W)
        self.layers = nn.ModuleList(MixtureBlock(kind()) for _ in range(L))
        self.norm, self.output = RMSNorm(W, EPS), nn.Linear(W, V, bias=False)
        self.register_buffer("freqs_cis", rotations(D, T, 1000000.0), persistent=False)
        initialised(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        n = input_ids.shape[1]
        x = self.tok_embeddings(input_ids)
        mask = torch.full((n, n), float("-inf"), dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, self.freqs_cis[:n], mask)
        return self.output(self.norm(x))


def _mixture(state: State, *, dense: bool) -> State:
    made = renamed(state, OUTER)
    for i, block in enumerate(blocks(state, "model.layers")):
        for name, heads in (("q", H), ("k", KV)):
            key = f"self_attn.{name}_proj.weight"
            block[key] = neighbours(block[key], heads)
        made |= renamed(block, META, f"layers.{i}.")
        to = f"layers.{i}.feed_forward."
        gate, up = block["mlp.experts.gate_up_proj"].chunk(2, 1)
        down, router = block["mlp.experts.down_proj"], block["mlp.gate.weight"]
        if dense:
            parts = {"gate": gate.mT, "up": up.mT, "down": down.mT, "router": router.t()}
            made |= {to + name: part for name, part in parts.items()}
            continue
        made[to + "gate.weight"] = router
        for j in range(EXPERTS):
            for name, part in (("w1", gate), ("w2", down), ("w3", up)):
                made[f"{to}experts.{j}.{name}.weight"] = part[j]
    return made


class GatedConv(nn.Module):
    """Causal depthwise convolution with a gate, as around the state of Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(W, 4 * W, bias=False)
        self.conv1d = nn.Conv1d(2 * W, 2 * W, KERNEL, groups=2 * W, padding=KERNEL - 1)
        self.out_proj = nn.Linear(2 * W, W, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        return self.out_proj(x * F.silu(z))


class Shifts(nn.Module):
    """The same branch by shifted sums, its two inputs projected apart."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(W, 2 * W, bias=False), nn.Linear(W, 2 * W, bias=False)
        self.taps, self.bias = nn.Parameter(torch.empty(KERNEL, 2 * W)), nn.Parameter(torch.zeros(2 * W))
        self.out = nn.Linear(2 * W, W, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        x = F.pad(self.value(u), (0, 0, KERNEL - 1, 0))
        y = sum((x[:, i : i + u.shape[1]] * tap for i, tap in enumerate(self.taps)), self.bias)
        gate = self.gate(u)
        return self.out(y * torch.sigmoid(y) * gate * torch.sigmoid(gate))


class Mixers(nn.Module):
    """Language model of one gated branch for each layer."""

    def __init__(self, slip: str = "", kind: type[nn.Module] = GatedConv) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, W)
        eps = 1e-3 if slip == "eps" else EPS
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": RMSNorm(W, eps), "mixer": kind()}) for _ in range(L + 1)
        )
        self.norm_f, self.lm_head = nn.RMSNorm(W, EPS), nn.Linear(W, V, bias=False)
        initialised(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        residual = self.embedding(input_ids)
        for layer in self.layers:
            residual = residual + layer["mixer"](layer["norm"](residual))  # type: ignore[index]
        return self.lm_head(self.norm_f(residual))


def to_shifts(state: State) -> State:
    """Projections apart, taps of the convolution as rows."""
    made = renamed(state, {name: name for name in ("embedding", "norm_f", "lm_head")})
    for i, block in enumerate(blocks(state, "layers")):
        to = f"layers.{i}.mixer."
        made[f"layers.{i}.norm.weight"] = block["norm.weight"]
        value, gate = block["mixer.in_proj.weight"].chunk(2)
        made |= {to + "value.weight": value, to + "gate.weight": gate}
        made[to + "taps"] = block["mixer.conv1d.weight"][:, 0].t()
        made[to + "bias"] = block["mixer.conv1d.bias"]
        made[to + "out.weight"] = block["mixer.out_proj.weight"]
    return made


_PLACES = styled(
    "layers.{}", "attention attention_norm", "feed_forward ffn_norm", "tok_embeddings", "norm output"
)
_MIXERS = styled("layers.{}", "mixer norm", "mixer norm", "embedding", "norm_f lm_head")
MIXTURES = {
    "a loop over experts": Style(Mixture, lambda state: _mixture(state, dense=False), *_PLACES),
    "all experts at once": Style(
        lambda slip="": Mixture(slip, Dense), lambda state: _mixture(state, dense=True), *_PLACES
    ),
}
CONVOLUTION = Style(Mixers, dict, *_MIXERS)
SHIFTS = Style(lambda slip="": Mixers(slip, Shifts), to_shifts, *_MIXERS)
