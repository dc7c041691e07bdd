"""What the code and the formulas are that the texts print as Post-LN and as Pre-LN.

Shapes: B batch, T tokens, D width.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normscope.claims.experiments import calls_of
from normscope.claims.form import Case, Evidence, Figure, Setup, Source, claim
from normscope.claims.norm_jacobian import distance
from normscope.claims.printed_code import (
    BATCH,
    DEPTH,
    HEADS,
    SNIPPETS,
    TOKENS,
    WIDTH,
    PreLNDecoderBlock,
    Printed,
    PrintedModel,
    TransformerBlock,
    model_of,
    read,
    torch_block,
)
from normscope.claims.readings import in_words, placement_of

SAME = 1e-5
"""Largest relative distance of two outputs that float32 explains."""


@claim(
    "C7",
    Source("004", "§3.3", "此处为Post-LN结构"),
    Source("004", "§3.2", "通常在加法之后进行"),
    Source("004", "§4.2", "这里采用Post-LN的常见变体示意"),
    Source("004", "§4.3", "这种写法对应 Post-LN 结构"),
    Source("004", "§4.2", "方案一：Post-LN"),
    Source("004", "§3.4", "Input -> SubLayer -> LN -> Add"),
    Source("004", "§5.2.1", "在Post-Norm中，第 $l$ 层的输出"),
    Source("004", "§8.3", "先做子层处理，再做归一化"),
    says="The code and the formulas printed as Post-LN are Post-LN.",
    asks="the anatomy reads the placement of each as the text calls it; a second witness: the output "
    "is that of torch's own block of that placement with the same weights",
    parts={
        "pre": "What the same text prints as Pre-LN is Pre-LN.",
        "others": "The other four texts print both under their right names.",
    },
)
def labelled_post(setup: Setup) -> Evidence:
    """Small models of every snippet, read; and their outputs beside those of torch's blocks."""
    cases = [_snippet_case(printed) for printed in SNIPPETS]
    claimed = [case for case in cases if not case.part]
    agree = sum(case.holds == (case.value <= SAME) for case in cases)
    return Evidence(
        cases,
        Figure.share("% of the places labelled Post-LN that are", cases),
        notes=[
            "Labelled Post-LN: "
            + ", ".join(f"{n} are {kind}" for kind, n in Counter(case.at["read"] for case in claimed).items())
            + ".",
            f"torch's blocks say the same as the anatomy in {agree} of {len(cases)} cases.",
        ],
        of="places",
    )


def _snippet_case(printed: Printed) -> Case:
    model = model_of(printed, 0)
    found = placement_of(read(model))
    x_BTD = torch.randn(BATCH, TOKENS, WIDTH)
    far = distance(model.stream(x_BTD), _by_torch(model, printed.label, x_BTD))
    part = "others" if printed.text != "004" else "" if printed.label == "post" else "pre"
    where = f"{printed.text} {printed.where} is {found}, its distance from {printed.label} of torch"
    at = {"read": found}
    return Case(None, where, far, found == printed.label, part, at=at)


def _by_torch(model: PrintedModel, label: str, x_BTD: Tensor) -> Tensor:
    for block in model.blocks:
        x_BTD = torch_block(block, label)(x_BTD)  # type: ignore[arg-type]
    return x_BTD


@claim(
    "B18",
    Source("003", "§4", "代码模板"),
    Source("004", "§4.3", "典型的 Pre-LN 结构数据流"),
    Source("004", "§4.2", "batch, seq_len, d_model"),
    says="The PyTorch templates printed in 003 and 004 are Pre-LN blocks.",
    asks="the anatomy reads every branch of a stack of them as Pre-LN",
    parts={
        "rms": "nn.RMSNorm can be put in for nn.LayerNorm without any other change (003).",
        "batch": "Fed [batch, sequence, features], as 004 §4.2 prints shapes, 004's block lets no sequence "
        "of the batch see another.",
        "final": "A stack of them is whole: it ends in a norm, as GPT-2's and LLaMA's do.",
    },
)
def templates(setup: Setup) -> Evidence:
    """Both templates: read, counted, and fed a batch of which one sequence is changed."""
    cases = [case for name in _templates() for case in _template_cases(name)]
    counts = {name: _norm_calls(name) for name in _templates()}
    return Evidence(
        cases,
        Figure.share("% of the templates that are Pre-LN", cases),
        notes=[
            f"{name} calls its norms {n} times a forward, for two branches." for name, n in counts.items()
        ],
        of="templates",
    )


def _templates() -> dict[str, list[nn.Module]]:
    """Blocks of each, freshly drawn."""
    return {
        "003, PreLNDecoderBlock": [PreLNDecoderBlock(WIDTH, HEADS) for _ in range(DEPTH)],
        "003 with nn.RMSNorm": [PreLNDecoderBlock(WIDTH, HEADS, nn.RMSNorm) for _ in range(DEPTH)],
        "004, TransformerBlock": [TransformerBlock(WIDTH, HEADS) for _ in range(DEPTH)],
    }


def _template(name: str) -> PrintedModel:
    torch.manual_seed(0)
    return PrintedModel(_templates()[name], causal=name.startswith("003")).eval()


def _template_cases(name: str) -> Iterator[Case]:
    model = _template(name)
    anatomy = read(model)
    where, pre = f"{name}: {in_words(anatomy)}", placement_of(anatomy) == "pre"
    if name == "003 with nn.RMSNorm":
        rms = pre and all(branch.norm == "rmsnorm" for branch in anatomy.branches)
        yield Case(None, where, float(rms), rms, "rms")
        return
    yield Case(None, where, float(pre), pre)
    yield Case(None, name, float(anatomy.final_norm), anatomy.final_norm, "final")
    if name.startswith("004"):
        where = f"{name}, change of the other sequences"
        yield Case.at_most(None, where, _seen_by_others(model), SAME, "batch")


@torch.no_grad()
def _seen_by_others(model: PrintedModel) -> float:
    """Relative change of the other outputs when the first sequence of a batch is another."""
    x_BTD = torch.randn(TOKENS, TOKENS, WIDTH)  # as many sequences as tokens: 003's mask fits either way
    other_BTD = torch.cat((torch.randn(1, TOKENS, WIDTH), x_BTD[1:]))
    return distance(model.stream(other_BTD)[1:], model.stream(x_BTD)[1:])


def _norm_calls(name: str) -> float:
    """Calls of norms in a forward, a block."""
    model = _template(name)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    with torch.no_grad(), calls_of(norms) as calls:
        model.stream(torch.randn(BATCH, TOKENS, WIDTH))
    return len(calls) / DEPTH
