"""Encoders of text, with the expected reading from their modelling code."""

from hf_base import BERT, LLAMA, VOCABULARY, XLM, entry, same
from readings import post, pre, stack

ENCODERS = [
    *same(
        "bert camembert xlm-roberta ernie data2vec-text rembert roformer deberta deberta-v2 "
        "roberta layoutlm bert-generation mpnet",
        BERT,
        post(),
    ),
    entry("roc_bert", {**BERT, "pronunciation_vocab_size": 8, "shape_vocab_size": 8}, post()),
    entry("electra", {**BERT, "embedding_size": 16}, post()),
    entry("squeezebert", {**BERT, "embedding_size": 32}, post()),
    entry("convbert", {**BERT, "embedding_size": 32}, post()),
    entry("nystromformer", {**BERT, "num_landmarks": 4, "segment_means_seq_len": 16}, post()),
    entry(
        "distilbert",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCABULARY},
        post(),
    ),
    # one module called twelve times: a block a call
    entry("albert", {**BERT, "embedding_size": 16, "num_hidden_layers": 3}, post(n=3)),
    entry("longformer", {**BERT, "attention_window": 4}, post()),
    entry("big_bird", {**BERT, "attention_type": "original_full"}, post()),
    entry(
        "big_bird",
        {**BERT, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
        post(),
        name="big_bird-sparse",
    ),
    entry("fnet", {k: v for k, v in BERT.items() if k != "num_attention_heads"}, post(branches="O F")),
    entry("xlm", XLM, post()),
    entry("flaubert", XLM, post()),
    entry("ibert", BERT, post()),
    entry("luke", {**BERT, "entity_vocab_size": 16, "entity_emb_size": 8}, post()),
    *same("megatron-bert roberta-prelayernorm xlm-roberta-xl", BERT, pre()),
    entry("esm", {**BERT, "position_embedding_type": "rotary", "mask_token_id": 4}, pre()),
    entry("nomic_bert", BERT, post()),
    entry("eurobert", LLAMA, pre("rmsnorm")),
    # the first block's attention norm is an Identity: nothing sits between the stream and that attention
    entry(
        "modernbert",
        {**BERT, "num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 3},
        (stack("A.none F.pre", "A.pre F.pre", "A.pre F.pre", norm="layernorm", final=True),),
    ),
    # the decoder starts from upsample(deep) + first block: a long skip, which is reported
    entry(
        "funnel",
        {
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "block_sizes": [1, 2],
            "num_decoder_layers": 1,
            "vocab_size": VOCABULARY,
        },
        post(n=4),
        one_stream=False,
        unread=True,
    ),
    # bottlenecks around a narrow stream of its own: a residual inside a residual
    entry("mobilebert", {**BERT, "embedding_size": 16, "intra_bottleneck_size": 16}, (), unread=True),
    entry(
        "mobilebert",
        {
            **BERT,
            "embedding_size": 16,
            "use_bottleneck": False,
            "num_feedforward_networks": 2,
            "normalization_type": "layer_norm",
        },
        post(branches="A F F"),
        name="mobilebert-wide",
    ),
    entry("clip_text_model", BERT, pre()),
]
