"""Placement of the norms in the models that the texts name, and the start of their branches."""

import functools
from collections import Counter
from collections.abc import Iterator

from torch import Tensor

from normscope.anatomy import Anatomy, capture, measuring, read_anatomy
from normscope.claims.form import Case, Evidence, Figure, Setup, claim
from normscope.claims.measure import NotMeasured
from normscope.errors import UsageError
from normscope.subjects import Subject, load, untouched

TINY = "num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=2"
SMALL = {
    "gpt2": "n_layer=2,n_embd=32,n_head=2",
    "llama": TINY,
    "llama4_text": f"{TINY},intermediate_size_mlp=64,num_key_value_heads=2,head_dim=16,num_local_experts=2",
    "deepseek_v3": f"{TINY},moe_intermediate_size=16,num_key_value_heads=2,n_routed_experts=4,n_group=2,"
    "topk_group=1,num_experts_per_tok=2,kv_lora_rank=16,q_lora_rank=16,first_k_dense_replace=1,"
    "qk_rope_head_dim=8,qk_nope_head_dim=8,v_head_dim=16",
    "modernbert": f"{TINY},pad_token_id=0,bos_token_id=1,eos_token_id=2,cls_token_id=1,sep_token_id=2",
}
"""Type of transformers → options of a small model."""
BERTS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "deberta-v2", "ernie", "megatron-bert"),
    *("roberta-prelayernorm", "modernbert"),
)
"""BERT and encoders that call themselves its variants."""
NAMED = {"GPT-3 (as GPT-2)": "gpt2", "LLaMA-4": "llama4_text", "DeepSeek-V3": "deepseek_v3"}
"""Name in 003 → type of transformers; GPT-3 has GPT-2's architecture."""
STARTS = {
    "GPT-3 (as GPT-2)": "hf:gpt2,vocab_size=256,n_layer=12,n_embd=64,n_head=4",
    "T5": "hf:t5,vocab_size=256,num_layers=6,num_heads=4,d_model=64,d_ff=256,d_kv=16",
}
ZERO = "nn:decoder,init=zero-output,depth=4,width=64"
"""A model of ours whose branches do start at zero, to compare with."""


@claim("B15")
def llms_are_pre_with_rmsnorm(setup: Setup) -> Evidence:
    """The reading of each model type, with small widths and its own norms."""
    cases: list[Case] = []
    for name, kind in NAMED.items():
        anatomy = small(kind)
        cases += [
            _placement_case(name, anatomy, norm="rmsnorm"),
            _placement_case(name, anatomy, "placement"),
            Case(None, name, float(anatomy.final_norm), anatomy.final_norm, "final"),
        ]
    return Evidence(
        cases,
        Figure.share("% of the models that are Pre-LN with RMSNorm", cases),
        notes=[f"Read as: {'; '.join(case.where for case in cases if not case.part)}."],
    )


def _placement_case(name: str, anatomy: Anatomy, part: str = "", norm: str | None = None) -> Case:
    """Share of the branches that are Pre-LN, with that kind of norm where one is named."""
    pre = [branch.placement == "pre" and norm in (None, branch.norm) for branch in anatomy.branches]
    return Case(None, f"{name}: {in_words(anatomy)}", sum(pre) / len(pre), all(pre), part)


@claim("C37")
def bert_is_pre(setup: Setup) -> Evidence:
    """The reading of the models named, and of BERT's family as transformers builds it."""
    named = {"GPT-2, GPT-3": "gpt2", "Llama": "llama", "BERT": "bert"}
    cases = [_placement_case(name, small(kind)) for name, kind in named.items()]
    family = {kind: placement_of(small(kind)) for kind in BERTS}
    found = [kind for kind in BERTS if family[kind].startswith("pre")]
    share = len(found) / len(BERTS)
    where = f"{len(found)} of {len(BERTS)} ({', '.join(found)})"
    cases.append(Case(None, where, share, share >= 0.5, "variants"))
    return Evidence(
        cases,
        Figure.share("% of the models named that are Pre-LN", cases),
        notes=[
            "The family, as read: " + ", ".join(f"{kind} {family[kind]}" for kind in BERTS) + ".",
            "§3.4, §5.2 and the table of §8.5 of the same text call BERT a Post-LN.",
        ],
    )


@claim("C38")
def t5_and_gpt3_start_at_zero(setup: Setup) -> Evidence:
    """Starting weights and branches of the two as transformers draws them, and of a zero start of ours."""
    cases = setup.cases(*(functools.partial(_start_cases, name) for name in STARTS))
    ours = [branch_shares(loaded(ZERO, seed)) for seed in setup.seeds]
    return Evidence(
        cases,
        Figure.largest("largest branch over the stream that it reads, in RMS", cases),
        notes=[f"A zero start of ours adds at most {max(map(max, ours)):.3g} of the stream."],
    )


def _start_cases(name: str, seed: int) -> Iterator[Case]:
    subject = loaded(STARTS[name], seed)
    anatomy = read_anatomy(subject)
    yield Case.at_most(seed, name, max(branch_shares(subject, anatomy)), 0.01)
    weights = dict(subject.model.named_parameters())
    maps = [each for branch in anatomy.branches for each in branch.projections]
    last = max(float(rms(weights[each.parameter])) for each in maps if each.roles[0] in ("o", "down"))
    yield Case(seed, f"{name}, RMS of its last maps", last, last == 0, "zero")


def branch_shares(subject: Subject, anatomy: Anatomy | None = None) -> list[float]:
    """RMS of each branch's output at the start over the RMS of the stream that it reads."""
    anatomy = anatomy or read_anatomy(subject)
    sites = {site for branch in anatomy.branches for site in (branch.entry, branch.output)}
    with untouched(subject.model), measuring(subject.model):
        _, found = capture(subject.model, subject.forward, sites)
    return [float(rms(found[branch.output]) / rms(found[branch.entry])) for branch in anatomy.branches]


def rms(x: Tensor) -> Tensor:
    """√(mean x²)."""
    return x.detach().double().square().mean().sqrt()


@functools.cache
def small(kind: str) -> Anatomy:
    """The reading of a small model of a type of transformers."""
    return read_anatomy(loaded(f"hf:{kind},vocab_size=256,{SMALL.get(kind, TINY)}", 0))


def loaded(spec: str, seed: int) -> Subject:
    """The model of `spec` on a short batch.

    Raises:
        NotMeasured: transformers, which has it, is not installed.
    """
    try:
        return load(spec, seed=seed, batch_size=2, seq_len=16)
    except UsageError as error:
        if "transformers to be installed" in str(error):
            raise NotMeasured("transformers is not installed here: pip install 'normscope[hf]'") from error
        raise


def placement_of(anatomy: Anatomy) -> str:
    """The placement of all branches, the commonest first where they differ; "unread" without any."""
    found = Counter(branch.placement for branch in anatomy.branches)
    return "/".join(placement for placement, _ in found.most_common()) or "unread"


def in_words(anatomy: Anatomy) -> str:
    """`pre with rmsnorm, final norm`."""
    norms = sorted({branch.norm for branch in anatomy.branches})
    final = "final norm" if anatomy.final_norm else "no final norm"
    return f"{placement_of(anatomy)} with {'/'.join(norms)}, {final}"
