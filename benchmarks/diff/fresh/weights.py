"""Weights of a decoder, and their names and layouts in each style."""

import torch
from torch import Tensor

from benchmarks.diff.fresh.attention import Canon, Opt
from benchmarks.diff.fresh.decoders import STYLES


def pack(canon: Canon, opt: Opt, style: str) -> dict[str, Tensor]:
    """Weights in the names and layouts of a style."""
    flax = style == "einsum"
    made = {"embedding" if flax else "wte.weight": canon["emb"]}
    if "pos" in canon:
        made["positions" if flax else "wpe.weight"] = canon["pos"]
    made["unembed" if flax else "lm_head.weight"] = canon["head"].T if flax else canon["head"]
    if "head.b" in canon:
        made["unembed_bias" if flax else "lm_head.bias"] = canon["head.b"]
    made |= _norm(canon, "final", "ln_f") | _norm(canon, "emb_norm", "emb_norm")
    for i in range(opt.depth):
        own = {k.partition(".")[2]: v for k, v in canon.items() if k.startswith(f"{i}.")}
        layer = _LAYERS[style](own, opt)
        names = STYLES[style][2]
        layer |= _norm(own, "n1", names[0]) | _norm(own, "n2", names[2])
        prefix = {"fused": f"h.{i}", "einsum": f"layer_{i}", "split": f"blocks.{i}"}[style]
        made |= {f"{prefix}.{name}": value for name, value in layer.items()}
    return made


def _norm(canon: Canon, role: str, name: str) -> dict[str, Tensor]:
    """A norm under both of the names that it may have."""
    made: dict[str, Tensor] = {}
    for end, ours in (("w", ("weight", "scale")), ("b", ("bias", "shift"))):
        if f"{role}.{end}" in canon:
            made |= {f"{name}.{our}": canon[f"{role}.{end}"] for our in ours}
    return made


def _linear(own: Canon, role: str, name: str) -> dict[str, Tensor]:
    made = {f"{name}.weight": own[role]} if role in own else {}
    return made | ({f"{name}.bias": own[f"{role}.b"]} if f"{role}.b" in own else {})


def _qk(own: Canon, name: str) -> dict[str, Tensor]:
    return {f"{name}.{r}_norm.scale": own[f"{r}n.w"] for r in "qk" if f"{r}n.w" in own}


def _fused(own: Canon, opt: Opt) -> dict[str, Tensor]:
    made = _linear(own, "o", "mixer.proj") | _linear(own, "down", "ffn.proj") | _qk(own, "mixer")
    each = opt.heads // opt.kv
    for end, leaf in (("", "weight"), (".b", "bias")):
        if f"q{end}" in own:
            q, k, v = (own[f"{r}{end}"].unflatten(0, (-1, opt.size)) for r in "qkv")
            q = q.unflatten(0, (opt.kv, each))
            made[f"mixer.attn.{leaf}"] = torch.cat((q, k[:, None], v[:, None]), 1).flatten(0, 2)
        if f"up{end}" in own:
            parts = [own[f"{r}{end}"] for r in ("gate", "up") if f"{r}{end}" in own]
            made[f"ffn.fc.{leaf}"] = torch.cat(parts)
    return made


def _einsum(own: Canon, opt: Opt) -> dict[str, Tensor]:
    made = _qk(own, "att")
    for role, name in (("q", "query"), ("k", "key"), ("v", "value")):
        made[f"att.{name}"] = own[role].T.unflatten(1, (-1, opt.size))
        if f"{role}.b" in own:
            made[f"att.{name}_bias"] = own[f"{role}.b"].unflatten(0, (-1, opt.size))
    made["att.out"] = own["o"].T.unflatten(0, (-1, opt.size))
    if "o.b" in own:
        made["att.out_bias"] = own["o.b"]
    for role, name in (("gate", "wg"), ("up", "wi"), ("down", "wo")):
        if role in own:
            made[f"mlp.{name}"] = own[role].T
        if f"{role}.b" in own:
            made[f"mlp.{name}_bias"] = own[f"{role}.b"]
    return made


def _split(own: Canon, opt: Opt) -> dict[str, Tensor]:
    made = _qk(own, "sa") | _linear(own, "o", "sa.out_lin") | _linear(own, "down", "ff.w2")
    for role in "qkv":
        made |= _linear(own, role, f"sa.{role}_lin")
    if opt.gated:
        return made | _linear(own, "gate", "ff.w1") | _linear(own, "up", "ff.w3")
    return made | _linear(own, "up", "ff.w1")


_LAYERS = {"fused": _fused, "einsum": _einsum, "split": _split}


def canon_of(opt: Opt, seed: int) -> Canon:
    """Weights with which no option is without effect."""
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int, base: float = 0.0, std: float | None = None) -> Tensor:
        return base + torch.randn(shape, generator=noise) * (std or shape[-1] ** -0.5)

    q, kv, d, h = opt.heads * opt.size, opt.kv * opt.size, opt.width, opt.hidden
    made = {"emb": draw(opt.vocab, d, std=0.5), "head": draw(opt.vocab, d)}
    made |= {"pos": draw(opt.length + 2, d, std=0.5)} if opt.table is not None else {}
    made["head"] = made["emb"] if opt.tied else made["head"]
    made |= {"head.b": draw(opt.vocab, std=0.2)} if opt.head_bias else {}
    norms = ["final", *(["emb_norm"] if opt.emb_norm else [])]
    for i in range(opt.depth):
        norms += [f"{i}.n1", f"{i}.n2"]
        shapes = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q), "up": (h, d), "down": (d, h)}
        shapes |= {"gate": (h, d)} if opt.gated else {}
        made |= {f"{i}.{role}": draw(*shape) for role, shape in shapes.items()}
        flags = dict.fromkeys("qkv", opt.qkv_bias) | {"o": opt.o_bias}
        flags |= dict.fromkeys(("up", "down", *(("gate",) if opt.gated else ())), opt.mlp_bias)
        made |= {f"{i}.{r}.b": draw(shapes[r][0], std=0.2) for r, on in flags.items() if on}
        made |= {f"{i}.{r}n.w": draw(opt.size, base=1.0, std=0.2) for r in "qk" if opt.qk}
    for name in norms:
        made[f"{name}.w"] = draw(d, base=1.0 - opt.plus, std=0.2)
        if opt.norm_bias or name == "emb_norm":
            made[f"{name}.b"] = draw(d, std=0.2)
    return made
