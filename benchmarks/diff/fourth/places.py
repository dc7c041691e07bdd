"""Places of the styles of the fourth set."""


def places(
    block: str, attention: str, mlp: str, embed: str, last: str, head: str, first: str = ""
) -> dict[str, str]:
    """Places of a style; modules of a block are separated by spaces, and `block` has {0} for the layer."""

    def within(names: str) -> str:
        return " ".join(f"{block}.{name}" for name in names.split())

    outside = {"embed": embed, "last": last, "head": head, "first": first or embed}
    return {"block": block, "attention": within(attention), "mlp": within(mlp), **outside}


ANY = dict.fromkeys(("block", "attention", "mlp", "embed", "last", "head", "first"), "*")
GPT2 = places(
    "transformer.h.{0}",
    "attn ln_1",
    "mlp ln_2",
    "transformer.wte transformer.wpe",
    "transformer.ln_f",
    "lm_head",
)
MEGATRON = places(
    "layers.{0}",
    "self_attention input_layernorm",
    "mlp post_attention_layernorm",
    "word_embeddings position_embeddings",
    "final_layernorm",
    "word_embeddings",
    "embedding_norm",
)
LLAMA = places(
    "model.layers.{0}",
    "self_attn input_layernorm",
    "mlp post_attention_layernorm",
    "model.embed_tokens",
    "model.norm",
    "lm_head",
)
META = places(
    "layers.{0}", "attention attention_norm", "feed_forward ffn_norm", "tok_embeddings", "norm", "output"
)
COURSE = places("layers.{0}", "attn ln1", "ffn ln2", "token_embeddings", "ln_final", "lm_head")
TUTORIAL = places("trf_blocks.{0}", "att norm1", "ff norm2", "tok_emb", "final_norm", "out_head")
LIT = places(
    "transformer.h.{0}",
    "attn norm_1 post_attention_norm",
    "mlp norm_2 post_mlp_norm",
    "transformer.wte",
    "transformer.ln_f",
    "lm_head",
)


NEOX = places(
    "gpt_neox.layers.{0}",
    "attention input_layernorm",
    "mlp post_attention_layernorm",
    "gpt_neox.embed_in",
    "gpt_neox.final_layer_norm",
    "lm_head",
)
OLMO = {**LLAMA, "attention": "model.layers.{0}.self_attn model.layers.{0}.post_attention_layernorm"}
OLMO["mlp"] = "model.layers.{0}.mlp model.layers.{0}.post_feedforward_layernorm"
SANDWICH = {
    **LLAMA,
    "attention": OLMO["attention"] + " model.layers.{0}.input_layernorm",
    "mlp": OLMO["mlp"] + " model.layers.{0}.pre_feedforward_layernorm",
}
SHARED = {**LLAMA, "mlp": "model.layers.{0}.mlp model.layers.{0}.input_layernorm"}
BERT = places(
    "bert.encoder.layer.{0}",
    "attention",
    "intermediate output",
    "bert.embeddings",
    "bert.encoder",
    "cls",
    "bert.embeddings.LayerNorm",
)
FAIRSEQ = places(
    "layers.{0}",
    "self_attn self_attn_layer_norm",
    "fc1 fc2 final_layer_norm",
    "embed_tokens embed_positions",
    "layers",
    "lm_head",
    "layernorm_embedding",
)
TEXTBOOK = places("blks.{0}", "attention addnorm1", "ffn addnorm2", "token_embedding", "blks", "mlm", "ln")
TORCH = places(
    "encoder.layers.{0}", "self_attn norm1", "linear1 linear2 norm2", "tok pos", "encoder", "decoder", "norm"
)
VIT = places(
    "vit.layers.{0}",
    "attention layernorm_before",
    "mlp layernorm_after",
    "vit.embeddings",
    "vit.layernorm",
    "classifier",
)
DINO = places(
    "encoder.layer.{0}",
    "attention norm1 layer_scale1",
    "mlp norm2 layer_scale2",
    "embeddings",
    "layernorm",
    "*",
)
TIMM = places("blocks.{0}", "attn norm1 ls1", "mlp norm2 ls2", "patch_embed", "norm", "head")
PLAIN = places("layers.{0}", "0", "1", "to_patch", "norm", "mlp_head")
CLIP = places(
    "encoder.layers.{0}", "self_attn layer_norm1", "mlp layer_norm2", "embeddings", "final_layer_norm", "*"
)
OPEN = places("resblocks.{0}", "attn ln_1", "mlp ln_2", "token_embedding", "ln_final", "*")
PALM = places(
    "layers.{0}",
    "fused_attn_ff_proj attn_out norm",
    "fused_attn_ff_proj ff_out norm",
    "token_emb",
    "norm",
    "token_emb",
)
GPTJ = places("transformer.h.{0}", "attn ln_1", "mlp ln_1", "transformer.wte", "transformer.ln_f", "lm_head")
BLOCKS = {**ANY, "attention": "blocks.{0}", "mlp": "blocks.{0}", "block": "blocks.{0}"}
PHI = {**SHARED, "last": "model.final_layernorm"}
TRANSFORMER = (
    {"attention": "transformer.encoder.layers.{0}.self_attn transformer.encoder.layers.{0}.norm1"}
    | {"mlp": "transformer.encoder.layers.{0}.linear1 transformer.encoder.layers.{0}.linear2"}
    | {"decoder": "transformer.decoder.layers.{0}.self_attn transformer.decoder.layers.{0}.norm1"}
    | {"cross": "transformer.decoder.layers.{0}.multihead_attn transformer.decoder.layers.{0}.norm2"}
    | {"ff": "transformer.decoder.layers.{0}.linear1 transformer.decoder.layers.{0}.linear2"}
    | {"block": "transformer.encoder.layers.{0}", "embed": "src_tok_emb tgt_tok_emb", "head": "generator"}
    | {"last": "transformer.encoder.norm", "second": "transformer.decoder.norm"}
)
TRANSFORMER["mlp"] += " transformer.encoder.layers.{0}.norm2"
TRANSFORMER["ff"] += " transformer.decoder.layers.{0}.norm3"
ANNOTATED = (
    {"attention": "encoder.layers.{0}.self_attn encoder.layers.{0}.sublayer.0"}
    | {"mlp": "encoder.layers.{0}.feed_forward encoder.layers.{0}.sublayer.1"}
    | {"decoder": "decoder.layers.{0}.self_attn decoder.layers.{0}.sublayer.0"}
    | {"cross": "decoder.layers.{0}.src_attn decoder.layers.{0}.sublayer.1"}
    | {"ff": "decoder.layers.{0}.feed_forward decoder.layers.{0}.sublayer.2"}
    | {"block": "encoder.layers.{0}", "embed": "src_embed tgt_embed", "head": "generator"}
    | {"last": "encoder.norm", "second": "decoder.norm"}
)
T5 = (
    {"attention": "encoder.block.{0}.layer.0", "mlp": "encoder.block.{0}.layer.1"}
    | {"decoder": "decoder.block.{0}.layer.0", "cross": "decoder.block.{0}.layer.1"}
    | {"ff": "decoder.block.{0}.layer.2", "block": "encoder.block.{0}", "embed": "shared", "head": "lm_head"}
    | {"last": "encoder.final_layer_norm", "second": "decoder.final_layer_norm"}
)
T5_PORT = (
    {"attention": "encoder.layers.{0}.attn encoder.rel_pos", "mlp": "encoder.layers.{0}.ff"}
    | {"decoder": "decoder.layers.{0}.attn decoder.rel_pos", "cross": "decoder.layers.{0}.cross"}
    | {"ff": "decoder.layers.{0}.ff", "block": "encoder.layers.{0}", "embed": "emb", "head": "emb"}
    | {"last": "encoder.norm", "second": "decoder.norm"}
)
DECODER = places(
    "layers.{0}",
    "self_attn self_attn_layer_norm",
    "fc1 fc2 final_layer_norm",
    "embed_positions embed_tokens",
    "layer_norm",
    "embed_tokens",
)
