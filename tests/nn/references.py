"""References of every scheme from the papers, five lines of float64 each.

x is the embedding's output, l the block from 1, L their number, F a branch, N a norm of the branch's own
slots; `entry` and `final` are the stack's norms at its ends.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import dense
import torch
from torch import Tensor, nn

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sub:
    """One sublayer: its block l of L, its number i of 2L, its kind, its branch and the norms of its slots."""

    l: int  # noqa: E741  # the papers' letter
    L: int
    i: int
    kind: str
    F: Map
    n_in: Map
    n_out: Map
    n: Map
    join: nn.Module


Reference = Callable[[list[Sub], Tensor, Map, Map], Tensor]
REFERENCES: dict[str, Reference] = {}


def reference(*names: str) -> Callable[[Reference], Reference]:
    """Register a function as the reference of `names`; each name once."""

    def keep(function: Reference) -> Reference:
        assert not REFERENCES.keys() & set(names), names
        REFERENCES.update(dict.fromkeys(names, function))
        return function

    return keep


@reference("post")
def _post(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = s.n(x + s.F(x))
    return x


@reference("pre", "gpt2", "sub-ln", "dyt", "derf", "seednorm", "bhyt", "scalenorm", "sigma-reparam")
def _pre(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.F(s.n_in(x))
    return final(x)


@reference("pre-no-final")
def _pre_no_final(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.F(s.n_in(x))
    return x


@reference("residual-no-norm", "t-fixup")
def _residual_no_norm(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.F(x)
    return x


@reference("peri")
def _peri(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    x = entry(x)
    for s in subs:
        x = x + s.n_out(s.F(s.n_in(x)))
    return final(x)


@reference("res-post", "swin-v2")
def _res_post(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    return _olmo2(subs, entry(x), entry, final)


@reference("olmo2")
def _olmo2(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.n_out(s.F(x))
    return final(x)


@reference("deepnorm")
def _deepnorm(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = s.n((2 * s.L) ** (1 / 4) * x + s.F(x))
    return x


@reference("normformer")
def _normformer(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        y = s.F(s.n_in(x))
        x = x + (s.n_out(y) if s.kind == "attention" else y)
    return final(x)


@reference("admin")
def _admin(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = s.n(s.join.omega * x + s.F(x))
    return x


@reference("rezero", "skipinit")
def _rezero(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.join.scale * s.F(x)
    return x


@reference("layerscale")
def _layerscale(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.join.scale * s.F(s.n_in(x))
    return final(x)


@reference("residual-dual")
def _residual_dual(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    r = x
    for s in subs:
        f = s.F(x)
        x, r = s.n(x + f), r + f
    return x + final(r)


@reference("b2t")
def _b2t(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    start = x
    for s in subs:
        start = x if s.kind == "attention" else start
        y = x + s.F(x)
        x = s.n(start + y if s.kind == "feed-forward" else y)
    return x


@reference("mix-ln")
def _mix_ln(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = s.n(x + s.F(x)) if s.l <= s.L // 4 else x + s.F(s.n_in(x))
    return final(x)


@reference("layernorm-scaling")
def _layernorm_scaling(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.F(s.n_in(x) / math.sqrt(s.l))
    return final(x)


@reference("gpas")
def _gpas(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        y = x + s.F(s.n_in(x))
        x = y - torch.nn.functional.silu(s.join.gate) * y
    return final(x)


@reference("hybridnorm")
def _hybridnorm(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for attention, feed_forward in zip(subs[::2], subs[1::2], strict=True):
        z = attention.n(x + attention.F(x))
        x = z + feed_forward.F(z)
    return final(x)


@reference("keel")
def _keel(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        f = s.F(s.n_in(x))
        x = x + f if s.l == 1 else s.n(2 * s.L * x + f)
    return x


@reference("siamesenorm")
def _siamesenorm(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    x, y = entry(x), x
    for s in subs:
        o = s.F(s.n_in(x + dense.norm(s.join.inner, y)))
        x, y = s.n(x + o / math.sqrt(2 * s.l)), y + o
    return x + final(y)


@reference("parallel")
def _parallel(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for l in range(1, subs[0].L + 1):  # noqa: E741
        x = x + sum(s.F(s.n_in(x)) for s in subs if s.l == l)
    return final(x)


@reference("plain")
def _plain(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = s.F(x)
    return x


@reference("fixup")
def _fixup(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.join.scale * s.F(x + s.join.shift)
    return x


@reference("highway")
def _highway(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        t = torch.sigmoid(dense.linear(s.join.transform, x))
        x = t * s.F(x) + (1 - t) * x
    return x


@reference("gtrxl")
def _gtrxl(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        y = s.F(s.n_in(x)).clamp(min=0)
        (w_r, w_z, w_h), (u_r, u_z) = s.join.of_update.weight.chunk(3), s.join.of_stream.weight.chunk(2)
        r = torch.sigmoid(y @ w_r.T + x @ u_r.T)
        z = torch.sigmoid(y @ w_z.T + x @ u_z.T - s.join.bias)
        h = torch.tanh(y @ w_h.T + (r * x) @ s.join.of_reset.weight.T)
        x = (1 - z) * x + z * h
    return x


@reference("hyper-connections")
def _hyper_connections(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    h = [x] * 4
    for s in subs:
        j, normed = s.join, [dense.norm(s.join.norm, h_i) for h_i in h]
        a = [j.mix[i] + j.mix_scale * torch.tanh(normed[i] @ j.dynamic_mix) for i in range(4)]
        b = [j.write[i] + j.write_scale * torch.tanh(normed[i] @ j.dynamic_write) for i in range(4)]
        f = s.F(s.n_in(sum(a[i][..., :1] * h[i] for i in range(4))))
        h = [sum(a[i][..., 1 + k, None] * h[i] for i in range(4)) + b[k] * f for k in range(4)]
    return final(sum(h))


def _manifold(subs: list[Sub], x: Tensor, mixing: Map) -> Tensor:
    """The last state of mHC and its kin, (B, T, 4, D); `mixing` makes R of its logits."""
    h = torch.stack([x] * 4, dim=-2)
    for s in subs:
        j = s.join
        flat = h.flatten(-2) / (h.square().mean((-2, -1)) + 1e-6).sqrt()[..., None]
        flat = flat if j.gain is None else flat * (1 + j.gain)
        sizes = (4, 4, len(j.weights.bias) - 8)
        scale = j.scales.repeat_interleave(torch.tensor(sizes))
        p, q, m = (scale * (flat @ j.weights.weight.T) + j.weights.bias).split(sizes, dim=-1)
        f = s.F(s.n_in((torch.sigmoid(p)[..., None] * h).sum(-2)))
        h = mixing(m) @ h + 2 * torch.sigmoid(q)[..., None] * f[..., None, :]
    return h


@reference("mhc")
def _mhc(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    def mixing(m: Tensor) -> Tensor:
        m = torch.exp(m).unflatten(-1, (4, 4))
        for _ in range(20):
            m = m / m.sum(-2, keepdim=True)
            m = m / m.sum(-1, keepdim=True)
        return m

    return final(_manifold(subs, x, mixing).mean(-2))


@reference("mhc-lite")
def _mhc_lite(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    def mixing(m: Tensor) -> Tensor:
        share = torch.exp(m) / torch.exp(m).sum(-1, keepdim=True)
        mixed = m.new_zeros(*m.shape[:-1], 4, 4)
        for r, order in enumerate(itertools.permutations(range(4))):
            for i, j in enumerate(order):
                mixed[..., i, j] += share[..., r]
        return mixed

    return final(_manifold(subs, x, mixing).sum(-2))


@reference("kromhc")
def _kromhc(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    def mixing(m: Tensor) -> Tensor:
        p, q = (torch.sigmoid(m[..., k] - m[..., k + 1]) for k in (0, 2))
        first, second = ([[s, 1 - s], [1 - s, s]] for s in (p, q))
        rows = [
            torch.stack([first[i // 2][j // 2] * second[i % 2][j % 2] for j in range(4)], -1)
            for i in range(4)
        ]
        return torch.stack(rows, -2)

    return final(_manifold(subs, x, mixing).sum(-2))


@reference("attnres", "block-attnres")
def _attnres(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    """Blocks of sums as in the authors' pseudocode: `completed` ones and the `partial` one."""
    in_blocks = subs[0].join.opens != subs[1].join.opens
    completed, partial, h = [], x, x
    for s in subs:
        if s.kind == "attention" if in_blocks else True:
            completed, partial = [*completed, partial], torch.zeros_like(x)
        partial = partial + s.F(s.n_in(h))
        v = [*completed, partial]
        w, gain = s.join.query, s.join.key_norm.weight
        scores = [
            (w * gain * (v_i / (v_i.square().mean(-1, keepdim=True) + 1e-6).sqrt())).sum(-1) for v_i in v
        ]
        total = sum(torch.exp(score) for score in scores)
        h = sum((torch.exp(score) / total)[..., None] * v_i for score, v_i in zip(scores, v, strict=True))
    return final(h)


@reference("nanochat")
def _nanochat(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    x = first = entry(x)
    for s in subs:
        if s.kind == "attention":
            x = s.join.stream_scale * x + s.join.embedding_scale * first
        x = x + s.F(s.n_in(x))
    return final(x)


@reference("ngpt")
def _ngpt(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    x = x / x.norm(dim=-1, keepdim=True)
    for s in subs:
        alpha = (0.05 * math.sqrt(x.shape[-1]) * s.join.alpha.weight).abs()
        f = s.F(x)
        h = x + alpha * (f / f.norm(dim=-1, keepdim=True) - x)
        x = h / h.norm(dim=-1, keepdim=True)
    return x


@reference("unit-scaling")
def _unit_scaling(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        tau = 1 / math.sqrt(s.L + s.i - 1)
        x = (x + tau * s.F(s.n_in(x))) / math.sqrt(1 + tau**2)
    return final(x)


@reference("dslm")
def _dslm(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = math.sqrt(1 - 1 / s.L) * x + math.sqrt(1 / s.L) * s.F(s.n_in(x))
    return final(x)


@reference("depth-mup")
def _depth_mup(subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    for s in subs:
        x = x + s.F(s.n_in(x)) / (s.L / 2)
    return final(x)
