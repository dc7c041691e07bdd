"""Comparisons to show: written by hand, no model behind them."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from normscope.compare.facts import FACTS, sentence
from normscope.compare.types import Compared, Diff, Difference, Pair, Part, Place

HOSTILE = "</script><script>alert(1)</script>\"'`|[red]&#@here\x1b[31m\u202e"
"""A name that ends tags, strings, cells, colours and directions."""
VERSIONS = {"normscope": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}
GPT2 = ("transformer", "h", "attn", "mlp")
LLAMA = ("model", "layers", "self_attn", "mlp")


def branch(path: str, kind: str, **facts: Any) -> Place:
    held = {"kind": kind, "placement": "pre", "norm": "layernorm", "norm_eps": 1e-5, "join": "add"}
    return Place("branch", path, held | {"branch_scale": None, "stream_scale": None} | facts)


def block(path: str, attention: str = "attn", mlp: str = "mlp", **facts: Any) -> Place:
    parts = (
        branch(f"{path}.{attention}", "attention", **facts),
        branch(f"{path}.{mlp}", "feed-forward", **facts),
    )
    return Place("block", path, {}, parts)


def stack(depth: int, names: Sequence[str] = GPT2, **facts: Any) -> Place:
    root, layers, attention, mlp = names
    blocks = tuple(block(f"{root}.{layers}.{i}", attention, mlp, **facts) for i in range(depth))
    return Place(
        "stack", layers, {"final_norm": "layernorm", "final_norm_eps": 1e-5, "long_skips": 0}, blocks
    )


def model(*stacks: Place, **facts: Any) -> Place:
    return Place("model", "", {"vocabulary": 256, "tied_head": True, "positions": "learnt"} | facts, stacks)


def aligned(a: Place | None, b: Place | None) -> Pair:
    """The two, place by place in their order."""
    parts = itertools.zip_longest(a.parts if a else (), b.parts if b else ())
    return Pair(a, b, tuple(aligned(*each) for each in parts))


def compared(**how: str) -> tuple[Compared, ...]:
    """Every part as "whole", or as `how` says: "not: reason" or "partly: reason"."""
    found = []
    for part in Part:
        word, _, why = how.get(str(part), "whole").partition(": ")
        found.append(Compared(part, word, (why,) if why else ()))  # type: ignore[arg-type]
    return tuple(found)


def said(parts: Iterable[Compared], part: Part, words: str, **figures: Any) -> tuple[Compared, ...]:
    """The parts, one of them with a result."""
    return tuple(replace(each, said=words, figures=figures) if each.part is part else each for each in parts)


def walk(rows: Pair, relative: Callable[[int], float | None]) -> list[dict[str, Any]]:
    """Steps at the branches, the k-th with the difference `relative(k)`."""
    found = []
    for stack_ in rows.parts:
        for block_ in stack_.parts:
            for each in block_.parts:
                site = {"a": each.a and each.a.name, "b": each.b and each.b.name, "name": "sum"}
                value = relative(len(found)) if each.a and each.b else None
                found.append(site | {"relative": value, "gradient": value and value * 3})
    return found


def difference(
    part: Part, name: str, sites: Iterable[str | tuple[str | None, str | None]], *values: Any, **more: Any
) -> Difference:
    pairs = tuple((site, site) if isinstance(site, str) else site for site in sites)
    a, b = values or (None, None)
    fact = name.replace("-", "_")
    said = sentence(fact, a, b) if fact in FACTS else f"The {name} is {a} in A and {b} in B."
    message = more.pop("message", said)
    return Difference(part, name, pairs, a, b, message, **more)


def same() -> Diff:
    """The same model, all parts compared."""
    rows = aligned(model(stack(4)), model(stack(4, LLAMA)))
    parts = compared(verdict="not: it takes a check of both models: --check runs them")
    figures = {"tolerance": 1e-10, "largest": 3e-12, "walk": walk(rows, lambda k: 1e-13 * (k + 1))}
    parts = said(parts, Part.FUNCTION, "the same function to 3e-12", **figures)
    weights = {
        "made_from": {
            f"model.layers.{i}.self_attn.{each}.weight": {
                "from": [f"transformer.h.{i}.attn.c_attn.weight"],
                "how": f"rows {32 * k}–{32 * k + 31}, transposed",
            }
            for i in range(4)
            for k, each in enumerate(("q_proj", "k_proj", "v_proj"))
        },
        "only_a": [],
        "only_b": [],
        "guessed": [],
    }
    return Diff(
        "hf:gpt2,n_layer=4,n_embd=32,n_head=4",
        "port.py:GPT",
        rows,
        parts,
        (),
        weights,
        cost={"structure": 0.4, "start": 0.2, "function": 1.1, "total": 1.7},
        versions=VERSIONS,
    )


def one() -> Diff:
    """One difference: ε of every norm, found in the structure and confirmed in the function."""
    base = same()
    rows = aligned(model(stack(4)), model(stack(4, LLAMA, norm_eps=1e-6)))
    sites = tuple(
        (f"transformer.h.{i}.{x}", f"model.layers.{i}.{y}")
        for i in range(4)
        for x, y in (("attn", "self_attn"), ("mlp", "mlp"))
    )
    message = "The norms add ε = 1e-05 to the variance in A and 1e-06 in B."
    first = difference(
        Part.FUNCTION,
        "norm-eps",
        sites,
        1e-5,
        1e-6,
        message=message,
        confirmed=True,
        is_first=True,
        evidence=(
            "The outputs of the first norm differ by 4.1e-5 (relative).",
            "With ε = 1e-05 in B, they differ by 2e-16.",
        ),
    )
    steps = walk(rows, lambda k: 4e-5 * 1.3**k)
    parts = said(
        base.parts,
        Part.FUNCTION,
        "the functions differ by 3.1e-4 (relative, at the output)",
        tolerance=1e-10,
        largest=3.1e-4,
        walk=steps,
    )
    return replace(
        base,
        rows=rows,
        parts=parts,
        differences=(difference(Part.STRUCTURE, "norm-eps", sites, 1e-5, 1e-6, message=message), first),
    )


def everything() -> Diff:
    """Differences in all parts, two of them in the function."""
    base = one()
    a, b = stack(12), stack(12, LLAMA, norm_eps=1e-6, norm="rmsnorm")
    b = replace(b, facts={"final_norm": None, "long_skips": 0})
    rows = aligned(model(a), model(b, tied_head=False, positions="rotary"))
    blocks = [(f"transformer.h.{i}", f"model.layers.{i}") for i in range(12)]
    branches = [
        (f"{x}.{p}", f"{y}.{q}") for x, y in blocks for p, q in (("attn", "self_attn"), ("mlp", "mlp"))
    ]
    S = Part.STRUCTURE
    found = (
        difference(S, "positions", [""], "learnt", "rotary"),
        difference(
            S,
            "tied-head",
            [""],
            True,
            False,
            message="The head's weight is the embedding's in A and its own in B.",
        ),
        difference(S, "norm", branches, "layernorm", "rmsnorm"),
        difference(S, "norm-eps", branches, 1e-5, 1e-6),
        difference(
            S,
            "final-norm",
            [("transformer.ln_f", None)],
            "layernorm",
            None,
            message="A ends with a layernorm; B has no final norm.",
        ),
        difference(
            Part.START,
            "deviation",
            [(f"{x}.attn.c_proj.weight", f"{y}.self_attn.o_proj.weight") for x, y in blocks],
            0.00408,
            0.02,
            message="Fresh output projections have a deviation of 0.00408 in A (depth-scaled) and 0.02 in B.",
            evidence=("5 seeds; the effect is 180 standard errors.",),
        ),
        difference(
            Part.RECIPE,
            "weight-decay",
            [""],
            {"gains": 0.0, "biases": 0.0},
            {"gains": 0.1, "biases": 0.1},
            message="Weight decay of gains and biases is 0 in A and 0.1 in B.",
        ),
        difference(Part.RECIPE, "learning-rate", [""], 6e-4, 3e-4),
        difference(
            Part.FUNCTION,
            "rotary-layout",
            branches[:1],
            "halves",
            "interleaved",
            message="Rotary embeddings turn halves of the head in A and neighbours in B.",
            confirmed=True,
            is_first=True,
            evidence=("The keys differ by 0.61 (relative) before the rotation is undone, 1e-15 after.",),
        ),
        difference(
            Part.FUNCTION,
            "missing-scale",
            branches[5:6],
            1.0,
            0.204,
            message="The branch is multiplied by 0.204 in B, and by nothing in A.",
            confirmed=False,
            evidence=("Undoing it leaves a difference of 2e-4.",),
        ),
        difference(
            Part.FUNCTION,
            "unexplained",
            branches[8:9],
            None,
            None,
            message="The outputs of the branch differ by 2e-4; no known reason explains it.",
        ),
        difference(
            Part.VERDICT,
            "verdict",
            [""],
            "healthy",
            "will fail",
            message='The verdict is "healthy" in A and "will fail" in B.',
        ),
        difference(
            Part.VERDICT,
            "finding-gained",
            blocks[3:],
            None,
            "NS301",
            message="B has the finding NS301 gradient-vanish; A does not.",
        ),
        difference(
            Part.VERDICT,
            "measurement",
            blocks[3:],
            1.2e-3,
            float("nan"),
            message="gradient/stream is 0.0012 in A and NaN in B.",
        ),
    )
    steps = walk(rows, lambda k: 1e-15 if k < 1 else 0.04 * 1.2**k)
    parts = said(
        compared(start="partly: 2 of 74 parameters have no partner"),
        Part.FUNCTION,
        "the functions differ by 0.7 (relative, at the output)",
        tolerance=1e-10,
        largest=0.7,
        walk=steps,
    )
    return replace(
        base,
        rows=rows,
        parts=parts,
        differences=found,
        notes=("A: sequences are shortened to 32 tokens, the context of the model.",),
    )


def inserted() -> Diff:
    """Two blocks of B that A lacks, one of A that B lacks, and a branch that B lacks in another."""
    a, b = stack(6), stack(7, LLAMA)
    pairs: list[Pair] = []
    order = [(0, 0), (1, 1), (None, 2), (None, 3), (2, 4), (3, None), (4, 5), (5, 6)]
    for i, k in order:
        pairs.append(aligned(None if i is None else a.parts[i], None if k is None else b.parts[k]))
    last = pairs[-1]
    lacking = replace(last.b, parts=last.b.parts[:1])  # type: ignore[union-attr,type-var]
    pairs[-1] = Pair(last.a, lacking, (last.parts[0], Pair(last.parts[1].a, None)))
    rows = Pair(model(a), model(b), (Pair(a, b, tuple(pairs)),))
    found = (
        difference(
            Part.STRUCTURE,
            "block-missing",
            [(None, "model.layers.2"), (None, "model.layers.3")],
            None,
            "a block of attention and feed-forward",
            message="B has the blocks model.layers.2 and model.layers.3; A has nothing there.",
        ),
        difference(
            Part.STRUCTURE,
            "block-missing",
            [("transformer.h.3", None)],
            "a block of attention and feed-forward",
            None,
            message="A has the block transformer.h.3; B has nothing there.",
        ),
        difference(
            Part.STRUCTURE,
            "branch-missing",
            [("transformer.h.5.mlp", None)],
            "feed-forward",
            None,
            message="A has the feed-forward branch transformer.h.5.mlp; B has nothing there.",
        ),
    )
    parts = compared(
        function="not: the blocks do not pair up, so weights cannot be mapped",
        recipe="not: A (m.py:f) has no recipe; a factory that returns a normscope.Run has one",
        verdict="not: it takes a check of both models: --check runs them",
    )
    return Diff("m.py:f", "m.py:g", rows, parts, found, None, versions=VERSIONS)


def not_all() -> Diff:
    """No difference, in the few parts that two reports allow."""
    rows = aligned(model(stack(2)), model(stack(2)))
    why = "A (a.json) cannot be compared here: it is a report, without weights"
    parts = compared(
        start=f"not: {why}", function=f"not: {why}", recipe="partly: the schedules are not in the reports"
    )
    return Diff("a.json", "b.json", rows, parts, (), versions=VERSIONS)


def hostile() -> Diff:
    """Names and messages that would break a page, a table or a terminal."""
    base = everything()
    worse = tuple(
        replace(
            each,
            sites=((f"{HOSTILE}.0", f"{HOSTILE}\n.1"),),
            message=f"{HOSTILE} {each.message}",
            a=HOSTILE,
            b=HOSTILE * 20,
            evidence=(HOSTILE,),
        )
        for each in base.differences
    )
    a = replace(stack(2), name=HOSTILE, parts=(block(HOSTILE, norm=HOSTILE), block(HOSTILE * 30)))
    rows = aligned(model(a, positions=HOSTILE), model(stack(2), positions=math.nan))
    weights = {
        "made_from": {HOSTILE: {"from": [HOSTILE], "how": HOSTILE}},
        "only_a": [HOSTILE],
        "only_b": [HOSTILE],
        "guessed": [HOSTILE],
    }
    parts = tuple(replace(each, said=HOSTILE, why=(HOSTILE,)) for each in base.parts)
    return replace(
        base,
        a=HOSTILE,
        b=HOSTILE * 4,
        rows=rows,
        parts=parts,
        differences=worse,
        weights=weights,
        notes=(HOSTILE,),
        versions={HOSTILE: HOSTILE},
        cost={HOSTILE: 1.0},
    )


def deep() -> Diff:
    """96 layers, of which one differs."""
    a, b = stack(96), stack(96, LLAMA)
    odd = block("model.layers.57", "self_attn", "mlp", placement="post")
    b = replace(b, parts=(*b.parts[:57], odd, *b.parts[58:]))
    rows = aligned(model(a), model(b))
    sites = [
        ("transformer.h.57.attn", "model.layers.57.self_attn"),
        ("transformer.h.57.mlp", "model.layers.57.mlp"),
    ]
    first = difference(
        Part.FUNCTION,
        "placement",
        sites[:1],
        "pre",
        "post",
        message="The norm stands before the branch in A and after the add in B.",
        confirmed=True,
        is_first=True,
    )
    found = (difference(Part.STRUCTURE, "placement", sites, "pre", "post"), first)
    steps = walk(rows, lambda k: 1e-14 if k < 114 else 0.3)
    parts = said(
        compared(),
        Part.FUNCTION,
        "the functions differ by 0.3 (relative, at the output)",
        tolerance=1e-10,
        largest=0.3,
        walk=steps,
    )
    return Diff("hf:gpt2,n_layer=96", "port.py:GPT", rows, parts, found, versions=VERSIONS)


def two_stacks() -> Diff:
    """An encoder–decoder; in the decoder's cross-attention the masks differ."""

    def of(names: Sequence[str]) -> Place:
        encoder = stack(3, ("encoder", names[1], *names[2:]))
        decoder = stack(3, ("decoder", names[1], *names[2:]))
        crossed = tuple(
            replace(
                each, parts=(each.parts[0], branch(f"{each.name}.cross", "cross-attention"), each.parts[1])
            )
            for each in decoder.parts
        )
        return model(replace(encoder, name="encoder"), replace(decoder, name="decoder", parts=crossed))

    rows = aligned(of(("", "block", "SelfAttention", "DenseReluDense")), of(("", "layers", "attn", "mlp")))
    sites = [(f"decoder.block.{i}.cross", f"decoder.layers.{i}.cross") for i in range(3)]
    message = "Padding of the encoder is masked in A and seen in B."
    first = difference(
        Part.FUNCTION, "mask", sites, "padding", None, message=message, confirmed=True, is_first=True
    )
    steps = walk(rows, lambda k: 1e-15 if k < 7 else 0.02)
    parts = said(
        compared(),
        Part.FUNCTION,
        "the functions differ by 0.02 (relative, at the output)",
        tolerance=1e-10,
        largest=0.02,
        walk=steps,
    )
    return Diff("hf:t5,num_layers=3", "seq.py:model", rows, parts, (first,), versions=VERSIONS)


def nothing() -> Diff:
    """Nothing in common: a causal model and one of images."""
    why = "A takes token ids of shape [4, 64], B floats of shape [4, 3, 32, 32]: their tasks differ"
    rows = Pair(model(stack(2)), model(Place("stack", "stages", {}, ())), ())
    return Diff(
        "hf:gpt2",
        "timm.py:resnet",
        rows,
        compared(**{str(part): f"not: {why}" for part in Part}),
        (),
        versions=VERSIONS,
    )


def interrupted() -> Diff:
    """Ctrl-C before anything was read."""
    late = "not: the comparison was interrupted before this part"
    empty = Pair(Place("model", ""), Place("model", ""))
    return Diff(
        "a.py:f",
        "b.py:f",
        empty,
        compared(**{str(part): late for part in Part}),
        (),
        notes=("interrupted: what was compared so far is shown",),
    )


def many() -> Diff:
    """200 differences of one part."""
    base = deep()
    more = tuple(
        difference(
            Part.START,
            "deviation",
            [(f"transformer.h.{i % 96}.attn.w{i}", f"model.layers.{i % 96}.self_attn.w{i}")],
            0.02,
            0.02 + 1e-4 * i,
        )
        for i in range(200)
    )
    return replace(base, differences=(*more, *base.of(Part.FUNCTION)))


ALL: dict[str, Callable[[], Diff]] = {
    each.__name__: each
    for each in (
        same,
        one,
        everything,
        inserted,
        not_all,
        hostile,
        deep,
        two_stacks,
        nothing,
        interrupted,
        many,
    )
}
