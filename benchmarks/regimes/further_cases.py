"""Ladders of larger batches and widths, of bfloat16 autocast, and of experts and state spaces.

Those held out and the fresh ones were fixed before any forecast of them was made.
"""

from dataclasses import replace
from functools import partial

from benchmarks.regimes.builders import Row, cases_of_text, causal, decoder, llama, plain, sizes
from benchmarks.regimes.case import Case
from benchmarks.regimes.feeds import tokens


def _sized(seed: int, size: int, length: int, parts: dict[str, list[Row]]) -> list[Case]:
    """Cases with batches of `size` × `length` tokens."""
    feed = partial(tokens, size=size, length=length)
    return cases_of_text("large", seed, feed, parts)


LARGE = [
    *_sized(
        7000,
        64,
        256,
        {
            "seen": [
                ("post 6 32 64x256", decoder("post", 6, 32), "library", 256, "adamw"),
            ],
            "held-out": [
                ("plain pre 5 32 64x256", plain(5, 32, norm_first=True, tie=False), "help", 256, "adamw"),
                ("deepnorm 8 32 64x256", decoder("deepnorm", 8, 32), "licences", 256, "adam"),
            ],
        },
    ),
    *_sized(
        7100,
        32,
        128,
        {
            "seen": [
                ("pre 5 64 32x128", decoder("pre", 5, 64), "library", 1024, "adamw"),
            ],
            "held-out": [
                ("gpt2 4 64 32x128", causal("gpt2", n_layer=4, n_embd=64, n_head=4), "help", 1024, "adamw"),
            ],
        },
    ),
    *_sized(
        7200,
        4,
        64,
        {
            "seen": [
                ("pre 4 256 4x64", decoder("pre", 4, 256), "library", 256, "adamw"),
                ("post 3 512 4x64", decoder("post", 3, 512), "library", 256, "adamw"),
            ],
            "held-out": [
                ("post 5 256 4x64", decoder("post", 5, 256), "help", 256, "adamw"),
                ("llama 3 512 4x64", causal("llama", **llama(3, 512)), "licences", 256, "adamw"),
            ],
        },
    ),
]

HALF = [
    replace(case, precision="bfloat16")
    for case in cases_of_text(
        "bfloat16",
        8000,
        tokens,
        {
            "seen": [
                ("post 6 32", decoder("post", 6, 32), "library", 256, "adamw"),
                ("gpt2 6 48 v1024", causal("gpt2", n_layer=6, n_embd=48, n_head=3), "library", 1024, "adamw"),
                ("deepnorm 10 32", decoder("deepnorm", 10, 32), "library", 256, "adam"),
            ],
            "held-out": [
                ("plain post 5 48", plain(5, 48, norm_first=False, tie=False), "help", 256, "adam"),
                ("pre 8 32 v1024", decoder("pre", 8, 32), "licences", 1024, "adamw"),
                ("peri 6 48", decoder("peri", 6, 48), "help", 256, "adamw"),
                ("llama 5 48", causal("llama", **llama(5, 48)), "licences", 256, "adamw"),
            ],
            "final": [
                ("plain post 6 32", plain(6, 32, norm_first=False, tie=False), "arrays", 256, "adamw"),
            ],
            "confirm": [
                ("gpt-neox 5 48", causal("gpt_neox", **sizes(5, 48)), "solvers", 256, "adamw"),
                ("post 5 48 v512", decoder("post", 5, 48), "solvers", 512, "adam"),
            ],
            "confirm-2": [
                ("sub-ln 7 48 v512", decoder("sub-ln", 7, 48), "learners", 512, "adamw"),
                ("gpt2 4 64", causal("gpt2", n_layer=4, n_embd=64, n_head=4), "learners", 256, "adamw"),
            ],
            "confirm-3": [
                ("peri 5 48 v512", decoder("peri", 5, 48), "models", 512, "adamw"),
            ],
        },
    )
]

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_MAMBA = {"num_hidden_layers": 4, "hidden_size": 32, "state_size": 8}
_MAMBA2 = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "state_size": 8,
    "head_dim": 16,
    "num_heads": 4,
    "n_groups": 1,
    "chunk_size": 32,
}

EXPERTS = cases_of_text(
    "experts and state spaces",
    9000,
    tokens,
    {
        "seen": [
            ("mixtral 4 48", causal("mixtral", **llama(4, 48), **_EXPERTS), "library", 256, "adamw"),
            ("mamba 4 32", causal("mamba", **_MAMBA), "library", 256, "adamw"),
            ("granitemoe 4 48", causal("granitemoe", **llama(4, 48), **_EXPERTS), "library", 256, "adamw"),
        ],
        "held-out": [
            (
                "qwen2-moe 4 48",
                causal(
                    "qwen2_moe",
                    **llama(4, 48),
                    num_experts=4,
                    moe_intermediate_size=48,
                    shared_expert_intermediate_size=48,
                ),
                "help",
                256,
                "adamw",
            ),
            (
                "olmoe 5 48",
                causal("olmoe", **llama(5, 48), num_experts=4, num_experts_per_tok=2),
                "licences",
                256,
                "adamw",
            ),
            (
                "mamba2 3 32",
                causal("mamba2", **_MAMBA2),
                "help",
                256,
                "adamw",
            ),
            (
                "falcon-mamba 3 32",
                causal("falcon_mamba", num_hidden_layers=3, hidden_size=32, state_size=8),
                "licences",
                256,
                "adam",
            ),
        ],
        "fresh": [
            ("mixtral 3 48", causal("mixtral", **llama(3, 48), **_EXPERTS), "modules", 256, "adam"),
            ("mamba2 4 32", causal("mamba2", **_MAMBA2 | {"num_hidden_layers": 4}), "modules", 256, "adamw"),
        ],
        "final": [
            ("mixtral 5 32", causal("mixtral", **llama(5, 32), **_EXPERTS), "arrays", 256, "adamw"),
        ],
        "confirm": [
            (
                "qwen3-moe 4 32",
                causal(
                    "qwen3_moe",
                    **llama(4, 32),
                    head_dim=16,
                    num_experts=4,
                    num_experts_per_tok=2,
                    moe_intermediate_size=32,
                ),
                "solvers",
                256,
                "adamw",
            ),
            ("mamba 5 32", causal("mamba", **_MAMBA | {"num_hidden_layers": 5}), "solvers", 256, "adamw"),
        ],
        "confirm-2": [
            (
                "olmoe 3 48",
                causal("olmoe", **llama(3, 48), num_experts=4, num_experts_per_tok=2),
                "learners",
                256,
                "adamw",
            ),
        ],
    },
)
