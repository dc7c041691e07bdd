"""Published architectures, their ports, and the conversions of their weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.diff.ports.blocks import Config
from benchmarks.diff.ports.conversions import from_gpt2, like_llama
from benchmarks.diff.ports.decoder import Port
from benchmarks.diff.ports.encoders import BERT, VIT, BertPort, VitPort, bert, from_bert, from_vit, vit
from benchmarks.diff.ports.t5 import Options, T5Port, from_t5, t5

State = dict[str, Tensor]
Places = tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """Sizes of a model and its port."""

    width: int = 32
    depth: int = 3
    heads: int = 4
    hidden: int = 80


@dataclass(frozen=True)
class Family:
    """A published architecture and its port.

    Attributes:
        published: fresh model of transformers, from changes of its configuration.
        make: port, from its options.
        options: the options under which the port is the same function.
        convert: state of the published model and options → state of the port.
        attention, mlp: modules of a branch of the published model, "*" for the layer, with its norms.
        decoder: modules of a layer of the decoder, where there is an encoder as well.
        first: modules before the first layer, in the published model and in the port.
        last: modules after the last layer.
    """

    published: Callable[..., nn.Module]
    make: Callable[..., nn.Module]
    options: Any
    convert: Callable[[State, Any], State]
    attention: Places
    mlp: Places
    first: tuple[Places, Places]
    last: tuple[Places, Places]
    port_attention: Places = ("layers.*.attn", "layers.*.in_1", "layers.*.out_1", "layers.*.stream_1")
    decoder: Places = ()
    port_decoder: Places = ()
    port_mlp: Places = ("layers.*.mlp", "layers.*.in_2", "layers.*.out_2", "layers.*.stream_2")

    def port(self, **changes: Any) -> nn.Module:
        """The port with fresh weights; changes that are no options are arguments of its class."""
        known = {each.name for each in fields(self.options)}
        options = replace(self.options, **{k: v for k, v in changes.items() if k in known})
        return self.make(options, **{k: v for k, v in changes.items() if k not in known})

    def places(self, where: str) -> tuple[Places, Places]:
        """Modules of A and of B at "attention 2", "mlp 0", "first" or "last"."""
        if where in ("first", "last"):
            return getattr(self, where)
        branch, _, layer = where.partition(" ")
        names = (getattr(self, branch), getattr(self, f"port_{branch}"))
        return tuple(tuple(each.replace("*", layer) for each in side) for side in names)  # type: ignore[return-value]


def lively(model: nn.Module, seed: int = 11) -> nn.Module:
    """Change all weights, gains and biases, so that none is as at the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((0.2 if parameter.dim() == 1 else 0.06) * noise)
    return model


def _causal(kind: str, options: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """Fresh causal models of transformers, of a type with options."""

    def published(**changes: Any) -> nn.Module:
        config = AutoConfig.for_model(kind, **{**options, **changes})
        config._attn_implementation = "eager" if kind == "gemma2" else "sdpa"
        return AutoModelForCausalLM.from_config(config)

    return published


def gpt2(size: Size) -> Family:
    """GPT-2."""
    sizes = {"n_embd": size.width, "n_layer": size.depth, "n_head": size.heads, "n_inner": size.hidden}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    rest = {"vocab_size": 256, "n_positions": 66, "bos_token_id": None, "eos_token_id": None}
    return Family(
        _causal("gpt2", sizes | none | rest),
        Port,
        Config(width=size.width, depth=size.depth, heads=size.heads, kv_heads=size.heads, hidden=size.hidden),
        from_gpt2,
        ("transformer.h.*.attn", "transformer.h.*.ln_1"),
        ("transformer.h.*.mlp", "transformer.h.*.ln_2"),
        (("transformer.wte", "transformer.wpe"), ("tok", "pos")),
        (("transformer.ln_f", "lm_head"), ("last", "head")),
    )


def _like_llama(
    kind: str, size: Size, options: Mapping[str, Any], port: Mapping[str, Any], norms: Mapping[str, str]
) -> Family:
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": size.width, "intermediate_size": size.hidden}
    sizes |= {"num_hidden_layers": size.depth, "num_attention_heads": size.heads, "rms_norm_eps": 1e-6}
    sizes |= {"num_key_value_heads": size.heads // 2, "max_position_embeddings": 64}
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    shape = {"width": size.width, "depth": size.depth, "heads": size.heads, "hidden": size.hidden}
    shape |= {"kv_heads": size.heads // 2, "fused": False, "bias": False, "bias_out": False, "gated": True}
    law = {"norm": "rms", "eps": 1e-6, "positions": "halves", "act": "silu", "tied": False}
    names = [tuple(a for a, b in norms.items() if b.endswith(end)) for end in ("_1", "_2")]
    return Family(
        _causal(kind, sizes | none | dict(options)),
        Port,
        Config(**{**shape, **law, **port}),
        like_llama(norms),
        ("model.layers.*.self_attn", *(f"model.layers.*.{each}" for each in names[0])),
        ("model.layers.*.mlp", *(f"model.layers.*.{each}" for each in names[1])),
        (("model.embed_tokens",), ("tok",)),
        (("model.norm", "lm_head"), ("last", "head")),
    )


def llama(size: Size) -> Family:
    """LLaMA with two query heads to a key head."""
    return _like_llama("llama", size, {}, {}, {"input_layernorm": "in_1", "post_attention_layernorm": "in_2"})


def olmo2(size: Size) -> Family:
    """OLMo-2, with norms after the branches and on q and k."""
    norms = {"post_attention_layernorm": "out_1", "post_feedforward_layernorm": "out_2"}
    norms |= {"self_attn.q_norm": "attn.nq", "self_attn.k_norm": "attn.nk"}
    port = {"norm_in": False, "norm_out": True, "qk_norm": "whole", "kv_heads": size.heads}
    return _like_llama("olmo2", size, {"num_key_value_heads": size.heads}, port, norms)


def gemma2(size: Size) -> Family:
    """Gemma-2, with a window of 16 in every second layer."""
    norms = {"input_layernorm": "in_1", "post_attention_layernorm": "out_1"}
    norms |= {"pre_feedforward_layernorm": "in_2", "post_feedforward_layernorm": "out_2"}
    options: dict[str, Any] = {
        "head_dim": size.width // size.heads,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
    }
    options |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    port = {"gain": 1.0, "norm_out": True, "act": "gelu tanh", "embed": size.width**0.5, "tied": True}
    port |= {"cap": 2.0, "cap_final": 3.0, "scale": 24**-0.5}
    windows = {each: {"window": 16} for each in range(0, size.depth, 2)}
    return _like_llama("gemma2", size, options, port | {"layers": windows}, norms)


def bert_of(size: Size) -> Family:
    """BERT with its head of masked language modelling."""
    sizes = {"hidden_size": size.width, "num_hidden_layers": size.depth, "num_attention_heads": size.heads}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": size.hidden}
    layer = "bert.encoder.layer.*"
    return Family(
        lambda **changes: bert(**{**sizes, **none, **changes}),
        BertPort,
        _shaped(BERT, size),
        from_bert,
        (f"{layer}.attention",),
        (f"{layer}.intermediate", f"{layer}.output"),
        (("bert.embeddings",), ("tok", "pos", "kind", "first")),
        (("cls",), ("dense", "last", "head")),
    )


def vit_of(size: Size) -> Family:
    """ViT with a class token."""
    sizes = {"hidden_size": size.width, "num_hidden_layers": size.depth, "num_attention_heads": size.heads}
    none = {"hidden_dropout_prob": 0.0, "intermediate_size": size.hidden}
    return Family(
        lambda **changes: vit(**{**sizes, **none, **changes}),
        VitPort,
        _shaped(VIT, size),
        from_vit,
        ("vit.layers.*.attention", "vit.layers.*.layernorm_before"),
        ("vit.layers.*.mlp", "vit.layers.*.layernorm_after"),
        (("vit.embeddings",), ("patch", "cls", "pos")),
        (("vit.layernorm", "classifier"), ("last", "head")),
    )


def t5_of(size: Size) -> Family:
    """T5; "attention 1" and "mlp 1" are those of the encoder's layer 1."""
    sizes = {"d_model": size.width, "d_kv": size.width // size.heads, "d_ff": size.hidden}
    sizes |= {"num_layers": size.depth, "num_heads": size.heads}
    return Family(
        lambda **changes: t5(**{**sizes, **changes}),
        T5Port,
        Options(width=size.width, depth=size.depth, heads=size.heads, hidden=size.hidden),
        from_t5,
        ("encoder.block.*.layer.0",),
        ("encoder.block.*.layer.1",),
        (("shared",), ("tok",)),
        (("decoder.final_layer_norm", "lm_head"), ("decoder.last", "tok")),
        port_attention=("encoder.levels.*.mix", "encoder.levels.*.mix_norm", "encoder.places"),
        port_mlp=("encoder.levels.*.wide", "encoder.levels.*.wide_norm"),
        decoder=("decoder.block.*",),
        port_decoder=("decoder.levels.*", "decoder.places"),
    )


def _shaped(config: Config, size: Size) -> Config:
    return replace(
        config, width=size.width, depth=size.depth, heads=size.heads, kv_heads=size.heads, hidden=size.hidden
    )


FAMILIES: dict[str, Callable[[Size], Family]] = {
    "GPT-2": gpt2,
    "LLaMA": llama,
    "OLMo-2": olmo2,
    "Gemma-2": gemma2,
    "BERT": bert_of,
    "ViT": vit_of,
    "T5": t5_of,
}
"""Architectures by name, of any size."""
