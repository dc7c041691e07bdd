"""Published decoders and an encoder that no other set has, of one size each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForMaskedLM

from benchmarks.diff.fresh.attention import Canon
from benchmarks.diff.fresh.published import NONE, Published
from benchmarks.diff.fresh.types import rope
from benchmarks.diff.new.parts import Spec

PLAIN = {f"{r}": f"self_attn.{r}_proj" for r in "qkvo"} | {"up": "mlp.up_proj", "down": "mlp.down_proj"}
PLAIN |= {"n1": "input_layernorm", "n2": "post_attention_layernorm"}
GATED = PLAIN | {"gate": "mlp.gate_proj"}
LN: dict[str, Any] = {"norm": "ln", "norm_bias": True, "gated": False, "eps": 1e-5}
BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
FUSED = {"concat": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
FUSED |= {"n1": "ln_1", "n2": "ln_2"}


@dataclass(frozen=True)
class New(Published):
    """A published model.

    Attributes:
        masked: whether it is an encoder.
        kernels: whether matrices of its layers are (in, out).
    """

    masked: bool = False
    kernels: bool = False

    def make(self, **changes: Any) -> nn.Module:
        if not self.masked:
            return super().make(**changes)
        config = AutoConfig.for_model(self.kind, **{**NONE, **self.config, **changes})
        made: nn.Module = AutoModelForMaskedLM.from_config(config)
        return made

    def state(self, seed: int) -> Canon:
        found = super().state(seed)
        kernels = ("c_attn.weight", "c_proj.weight", "c_fc.weight") if self.kernels else ()
        return {k: v.T if k.endswith(kernels) else v for k, v in found.items()}


def _relative(kind: str, opt: Spec, masked: bool = False, **more: Any) -> New:
    """A relative of LLaMA."""
    config: dict[str, Any] = {"vocab_size": opt.vocab, "hidden_size": opt.width}
    config |= {"intermediate_size": opt.hidden, "num_hidden_layers": opt.depth}
    config |= {"num_attention_heads": opt.heads, "num_key_value_heads": opt.kv, "head_dim": opt.size}
    config |= {"max_position_embeddings": opt.length, "tie_word_embeddings": opt.tied}
    config |= {"rope_parameters": rope(opt.base), "attention_dropout": 0.0}
    if opt.norm == "rms":
        config |= {"rms_norm_eps": opt.eps}
    fields = {k: more.pop(k) for k in ("roles", "attention", "mlp") if k in more}
    fields.setdefault("roles", GATED if opt.gated else PLAIN)
    return New(kind, config | more, opt, masked=masked, **fields)


def olmo() -> New:
    opt = Spec(56, 3, 7, 7, 8, 92, 119, norm="ln", affine=False, eps=1e-5, turned=8)
    return _relative("olmo", opt)


def arcee() -> New:
    return _relative("arcee", Spec(60, 2, 6, 3, 10, 130, 141, gated=False, act="relu2", turned=10, eps=1e-5))


def helium() -> New:
    return _relative("helium", Spec(64, 2, 4, 2, 16, 70, 101, turned=16, pairs=True, eps=1e-5, base=1e5))


def ernie() -> New:
    opt = Spec(50, 3, 5, 1, 10, 76, 163, turned=10, pairs=True, eps=1e-5, base=5e5, tied=True)
    return _relative("ernie4_5", opt, use_bias=False)


def seed_oss() -> New:
    opt = Spec(46, 2, 6, 2, 12, 98, 204, turned=12, qkv_bias=True, eps=1e-6)
    more: dict[str, Any] = {"attention_bias": True, "attention_out_bias": False, "residual_dropout": 0.0}
    return _relative("seed_oss", opt, **more)


def hunyuan() -> New:
    opt = Spec(54, 3, 4, 2, 14, 82, 117, turned=14, qk="late", eps=1e-5)
    roles = GATED | {"qn": "self_attn.query_layernorm", "kn": "self_attn.key_layernorm"}
    return _relative("hunyuan_v1_dense", opt, roles=roles)


def exaone() -> New:
    opt = Spec(58, 2, 4, 1, 18, 64, 155, turned=18, qk="head", place="out", eps=1e-5)
    roles = GATED | {"qn": "self_attn.q_norm", "kn": "self_attn.k_norm"}
    roles |= {"n1": "post_attention_layernorm", "n2": "post_feedforward_layernorm"}
    return _relative(
        "exaone4", opt, roles=roles, sliding_window=None, layer_types=["full_attention"] * 2,
        attention=("self_attn", "post_attention_layernorm"), mlp=("mlp", "post_feedforward_layernorm"),
    )  # fmt: skip


def jais() -> New:
    opt = Spec(70, 2, 5, 5, 14, 124, 148, act="relu2", turned=14, **BIASES, **LN)
    return _relative("jais2", opt, attention_bias=True, mlp_bias=True, layer_norm_eps=1e-5)


def openai() -> New:
    opt = Spec(
        36, 4, 3, 3, 12, 144, 95, act="tanh", table=0, tied=True, place="post", final=False, **BIASES, **LN
    )
    config: dict[str, Any] = {"vocab_size": 95, "n_positions": 82, "n_embd": 36, "n_layer": 4, "n_head": 3}
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"emb": "transformer.tokens_embed", "pos": "transformer.positions_embed", "head": "lm_head"}
    return New(
        "openai-gpt", config, opt, "transformer.h.{}", FUSED, ends, ("attn", "ln_1"), ("mlp", "ln_2"),
        kernels=True,
    )  # fmt: skip


def bigcode() -> New:
    opt = Spec(56, 2, 4, 1, 14, 90, 171, act="tanh", table=0, tied=True, **BIASES, **LN)
    config: dict[str, Any] = {"vocab_size": 171, "n_positions": 82, "n_embd": 56, "n_layer": 2, "n_head": 4}
    config |= {"n_inner": 90, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
    ends = {
        "emb": "transformer.wte",
        "pos": "transformer.wpe",
        "final": "transformer.ln_f",
        "head": "lm_head",
    }
    return New("gpt_bigcode", config, opt, "transformer.h.{}", FUSED, ends, ("attn", "ln_1"), ("mlp", "ln_2"))


def eurobert() -> New:
    opt = Spec(44, 3, 4, 2, 12, 86, 127, turned=12, mask="none", eps=1e-5)
    return _relative("eurobert", opt, masked=True, mask_token_id=1)


MAKERS: dict[str, Callable[[], New]] = {
    "OLMo": olmo, "Arcee": arcee, "Helium": helium, "ERNIE-4.5": ernie, "Seed-OSS": seed_oss,
    "Hunyuan": hunyuan, "EXAONE-4": exaone, "Jais-2": jais, "GPT-1": openai, "StarCoder": bigcode,
    "EuroBERT": eurobert,
}  # fmt: skip
"""Published models by name."""
_MADE: dict[str, New] = {}


def published(name: str) -> New:
    """A published model."""
    if name not in _MADE:
        _MADE[name] = MAKERS[name]()
    return _MADE[name]
