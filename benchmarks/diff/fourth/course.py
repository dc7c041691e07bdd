"""LLaMA in the style of a course's first assignment: own linear layers, rotation matrices, einsum."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.fourth.base import VOCABULARY, State, renamed
from benchmarks.diff.fourth.llama import GROUPS, HEADS, HIDDEN, LAYERS, OPTIONS, SIZE, WIDTH, to_meta


class Linear(nn.Module):
    """Linear layer of a course: truncated normal weights, no bias."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        std = math.sqrt(2 / (d_in + d_out))
        drawn = nn.init.trunc_normal_(torch.empty(d_out, d_in), std=std, a=-3 * std, b=3 * std)
        self.weight = nn.Parameter(drawn)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """Table of a course."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(vocab_size, d_model), a=-3, b=3))

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids, :]


class CourseNorm(nn.Module):
    """RMSNorm of a course; "outside" puts ε behind the root."""

    def __init__(self, eps: float, how: str = "inside") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps, self.how = eps, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "layer":
            x = x - x.mean(-1, keepdim=True)
        rms = torch.sqrt(torch.einsum("...d,...d->...", x, x) / x.shape[-1] + self.eps)
        return x / rms.unsqueeze(-1) * self.weight


class CourseAttention(nn.Module):
    """Attention of a course: rotation matrices, softmax by hand, einsum."""

    turns: Tensor

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.q_proj, self.k_proj = Linear(WIDTH, WIDTH), Linear(WIDTH, GROUPS * SIZE)
        self.v_proj, self.output_proj = Linear(WIDTH, GROUPS * SIZE), Linear(WIDTH, WIDTH)
        angles = torch.arange(64)[:, None] / o["theta"] ** (torch.arange(0, SIZE, 2) / SIZE)
        rows = [torch.stack([angles.cos(), -angles.sin()], -1), torch.stack([angles.sin(), angles.cos()], -1)]
        self.register_buffer("turns", torch.stack(rows, -2), persistent=False)
        self.o = o

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        q = self.q_proj(x).unflatten(-1, (GROUPS, HEADS // GROUPS, SIZE))
        k = self.k_proj(x).unflatten(-1, (GROUPS, SIZE))
        v = self.v_proj(x).unflatten(-1, (GROUPS, SIZE))
        turn = self.turns[:T]
        q = torch.einsum("tpij,btgrpj->btgrpi", turn, q.unflatten(-1, (-1, 2))).flatten(-2)
        k = torch.einsum("tpij,btgpj->btgpi", turn, k.unflatten(-1, (-1, 2))).flatten(-2)
        scores = torch.einsum("bqgrd,bkgd->bgrqk", q, k) / SIZE**0.5 * self.o["scale"]
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril(self.o["early"])
        scores = scores.masked_fill(~allowed, float("-inf"))
        scores = torch.exp(scores - scores.max(-1, keepdim=True).values)
        weights = scores / scores.sum(-1, keepdim=True)
        return self.output_proj(torch.einsum("bgrqk,bkgd->bqgrd", weights, v).flatten(2))


class SwiGLU(nn.Module):
    """Feed-forward of a course."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


class CourseBlock(nn.Module):
    """Layer of a course."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.attn, self.ffn = CourseAttention(o), SwiGLU()
        self.ln1, self.ln2 = CourseNorm(o["eps"], o["norm"]), CourseNorm(o["eps"], o["norm"])
        self.grad = o["grad"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.ln1(x))
        if self.grad != 1:
            y = y * self.grad + y.detach() * (1 - self.grad)
        x = x + y
        return x + self.ffn(self.ln2(x))


class CourseLM(nn.Module):
    """Language model of a course."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        self.token_embeddings = Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(CourseBlock(o) for _ in range(LAYERS)))
        self.ln_final = CourseNorm(o["eps"], o["norm"])
        self.lm_head = Linear(WIDTH, VOCABULARY)
        if o["start"] == "small table":
            nn.init.trunc_normal_(self.token_embeddings.weight, std=0.02)
        for parameter in self.layers.parameters():
            if o["start"] == "uniform" and parameter.dim() == 2:
                far = math.sqrt(6 / sum(parameter.shape))
                nn.init.uniform_(parameter, -far, far)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.lm_head(self.ln_final(self.layers(self.token_embeddings(token_ids))))


def course(**options: Any) -> nn.Module:
    """A model in the style of a course."""
    return CourseLM({**OPTIONS, **options})


COURSE_NAMES = (
    ("^tok_embeddings", "token_embeddings"),
    (r"^norm", "ln_final"),
    (r"^output", "lm_head"),
    (r"attention\.wo", "attn.output_proj"),
    (r"attention\.w(.)", r"attn.\1_proj"),
    ("attention_norm", "ln1"),
    ("ffn_norm", "ln2"),
    ("feed_forward", "ffn"),
)


def to_course(state: State) -> State:
    """A course's weights."""
    return renamed(to_meta(state), *COURSE_NAMES)
