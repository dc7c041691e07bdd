"""Plausible reports made from nothing, for looking at the page and testing it."""

import math
import random
from collections.abc import Callable
from typing import Any

from normscope.anatomy import Anatomy, Block, Branch, Norm, Projection, Site, Stack
from normscope.forecast import Forecast, ForecastStep
from normscope.probes import Measurement, Measurements, not_measured
from normscope.report import Report
from normscope.rules import Finding, Severity

HOSTILE = "<script>alert(1)</script>\"'&]]></style><img src=x onerror=alert(2)>"


def branch(
    path: str, kind: str, placement: str, call: int = 0, entry: Site | None = None, **other: Any
) -> Branch:
    """A branch whose norms stand where `placement` says."""

    def site(op: str) -> Site:
        return Site(path, call, op, 0)

    entry, output, total = entry or site("entry"), site("out"), site("sum")
    before = Norm("layernorm", f"{path}.norm_in", entry, site("n1"), 1e-5, f"{path}.norm_in.weight")
    after = Norm("layernorm", f"{path}.norm_out", site("raw"), output, 1e-5, f"{path}.norm_out.weight")
    stream = Norm("layernorm", f"{path}.norm", total, site("n2"), 1e-5, f"{path}.norm.weight")
    norms = {"pre": (before,), "post": (stream,), "res-post": (after,), "peri": (before, after), "none": ()}[
        placement
    ]
    fields = {"join": "add", "stream_scale": None, "branch_scale": None, "scheme": None} | other
    roles = ("q", "k", "v", "o") if "attention" in kind else ("up", "down")
    projections = tuple(Projection(f"{path}.{r}.weight", (r,), site(r), 0) for r in roles)
    norm = "layernorm" if norms else "none"
    return Branch(
        kind,
        placement,
        norm,
        path,
        call,
        fields["join"],
        fields["stream_scale"],
        fields["branch_scale"],
        fields["scheme"],
        entry,
        output,
        total,
        norms,
        projections,
    )  # type: ignore[arg-type]


def stack(
    name: str,
    depth: int,
    placement: str,
    *,
    prefix: str = "h",
    cross: bool = False,
    final: bool = True,
    **other: Any,
) -> Stack:
    """A stack of `depth` equal blocks."""
    kinds = ["attention", *(["cross-attention"] if cross else []), "feed-forward"]
    short = {"attention": "attn", "cross-attention": "cross", "feed-forward": "mlp"}
    blocks = []
    for i in range(depth):
        path = f"{prefix}.{i}"
        entry, leave = Site(path, 0, "entry", 0), Site(path, 0, "exit", 0)
        blocks.append(
            Block(
                path,
                0,
                tuple(branch(f"{path}.{short[k]}", k, placement, **other) for k in kinds),
                entry,
                leave,
            )
        )
    hidden = Site(prefix, 0, "hidden", 0)
    norm = Norm("layernorm", f"{prefix}.final_norm", hidden, hidden, 1e-5, None) if final else None
    return Stack(name, tuple(blocks), norm, hidden)


def measure(
    anatomy: Anatomy, *, decay: float = 1.0, collapse: float = 1.0, growth: float = 0.04
) -> list[Measurement]:
    """Figures by depth: the gradient shrinks by `decay` a block on its way down, diversity by `collapse`."""
    dice = random.Random(0)

    def near(x: float) -> float:
        return x * math.exp(dice.gauss(0, 0.08))

    rows = [
        Measurement("gradient/total", "", 2.31),
        Measurement("precision/float16-headroom", "", 12.8, "bits"),
    ]
    rows += [
        Measurement("precision/bfloat16-cosine", "", 0.9991),
        Measurement("precision/float16-flushed", "", 0.013),
    ]
    for s in anatomy.stacks:
        depth = len(s.blocks)
        places = [
            (f"{s.name}.input", 0),
            *((b.site, i + 1) for i, b in enumerate(s.blocks)),
            (f"{s.name}.hidden", depth),
        ]
        for site, i in places:
            rows.append(Measurement("stream/mean", site, dice.gauss(0, 0.01)))
            rows.append(Measurement("stream/rms", site, near(0.14 * (1 + growth * i))))
            rows.append(Measurement("stream/max", site, near(2.0)))
            rows.append(Measurement("stream/kurtosis", site, near(3.1)))
            rows.append(Measurement("stream/diversity", site, min(1.0, near(0.93 * collapse**i))))
            if not site.endswith(".hidden"):
                rows.append(Measurement("gradient/stream", site, near(0.02 * decay ** (depth - i))))
        for i, b in enumerate(s.blocks):
            rows.append(Measurement("gradient/block", b.site, near(0.5 * decay ** (depth - i))))
            rows.append(
                Measurement("jacobian/sigma-max", b.site, near(1.6), how="iterative, relative error ≤ 1e-2")
            )
            rows.append(not_measured("jacobian/sigma-min", b.site, "exact only up to 1024 × 1024"))
            for r in b.branches:
                rows.append(Measurement("branch/rms", r.site, near(0.09)))
                rows.append(Measurement("branch/update-ratio", r.site, near(0.6 / (1 + i))))
                rows.append(Measurement("branch/zero-output", r.site, 0.0))
                rows.append(Measurement("branch/trainable", r.site, 1.0))
                rows.append(
                    Measurement(
                        "jacobian/branch-norm", r.site, near(0.55), how="iterative, relative error ≤ 1e-2"
                    )
                )
                if "attention" in r.kind:
                    rows.append(Measurement("attention/entropy", r.site, min(1.0, near(0.93))))
                    rows.append(Measurement("attention/max-logit", r.site, near(1.4)))
                    for role in "qkvo":
                        starved = 2e-2 * collapse**i if role in "qk" else 1.0
                        rows.append(
                            Measurement(
                                f"gradient/{role}", r.site, near(1e-4 * starved * decay ** (depth - i))
                            )
                        )
                for n in r.norms:
                    rows.append(
                        Measurement("gradient/erased", n.path, min(1.0, near(0.004 if decay == 1 else 0.3)))
                    )
        rows.append(Measurement("jacobian/sigma-max", s.name, 41.3, how="iterative, relative error ≤ 1e-2"))
        values = tuple(near(3 * math.exp(-j / 60)) for j in range(256))
        rows.append(
            Measurement("jacobian/token-singular-values", s.name, tuple(sorted(values, reverse=True)))
        )
        rows.append(Measurement("jacobian/contraction", s.name, -0.31, "decades"))
    return rows


def trial(
    *, fails: bool, names: tuple[str, ...] = ("decoder",), steps: int = 20, anatomy: Anatomy | None = None
) -> Forecast:
    """A trial that trains, or one whose tokens collapse."""
    curve = []
    for step in range(steps + 1):
        diversity = (
            0.9 * 10 ** (-9 * (1 - math.exp(-step / 3)))
            if fails
            else 0.9 * 10 ** (-2 * math.sin(step / 7) ** 2)
        )
        loss = 3.3 + 2.2 * math.exp(-step / 2.5) - (0 if fails else 0.02 * step)
        curve.append(
            ForecastStep(
                step,
                None if step == 0 else loss + 0.03,
                loss,
                {name: diversity * (1 + i) for i, name in enumerate(names)},
                0.9 - 0.01 * step if step % 5 == 0 else None,
                None if step == 0 else 3e-3,
                {
                    block.site: (0.8 if fails else 1.01) ** (step * (len(stack.blocks) - i) / 4)
                    for stack in (anatomy.stacks if anatomy else ())
                    for i, block in enumerate(stack.blocks)
                }
                if step
                else {},
            )
        )
    reason = (
        (
            "After 20 Adam steps at 0.001 the tokens of the last hidden "
            "state are alike to 9e-10 and the loss stands at the unigram entropy."
        )
        if fails
        else (
            "After 20 AdamW steps at 0.0003 the loss is 2.93, 0.37 "
            "nats under the unigram entropy, and tokens still differ (diversity 0.1)."
        )
    )
    return Forecast(
        "collapses" if fails else "trains",
        reason,
        "adam" if fails else "adamw",
        1e-3 if fails else 3e-4,
        0,
        steps,
        3.31,
        tuple(curve),
    )


def recipe(name: str) -> dict[str, Any]:
    """A recipe with an optimizer and a schedule of this name."""
    group = {"tensors": 12, "parameters": 999, "lr": 3e-4, "weight_decay": 0.01, "betas": [0.9, 0.999]}
    return {
        "own": True,
        "optimizers": [{"name": name, "groups": [group | {"eps": 1e-8}]}],
        "schedule": name,
        "warmup": 0,
        "run_steps": None,
        "clip": 1.0,
        "accumulation": 2,
        "precision": "bfloat16",
    }


def report(anatomy: Anatomy, rows: list[Measurement], **other: Any) -> Any:
    """A report around a reading and its figures."""
    fields = {
        "schema": "normscope.report/1",
        "model": "hf:gpt2,n_layer=12",
        "input": "4 × 64 bytes of the Python standard library's source",
        "seed": 0,
        "device": "cpu",
        "versions": {"normscope": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
        "forecast": None,
        "ladder": None,
        "remedies": None,
        "recipe": recipe("AdamW"),
        "findings": (),
        "verdict": "healthy",
        "cost": {
            "load": 0.4,
            "anatomy": 0.9,
            "signal": 0.2,
            "gradient": 0.6,
            "jacobian": 4.4,
            "forecast": 9.1,
            "total": 15.6,
        },
        "budget": {},
        "notes": (),
        "cut_short": "",
    }
    return Report(**fields | {"anatomy": anatomy, "measurements": Measurements(rows)} | other)


def collapse_findings(blocks: tuple[Block, ...]) -> tuple[Finding, ...]:
    """The findings of the rules on a deep Post-LN stack."""
    sites = tuple(b.site for b in blocks)
    half = sites[: max(1, len(sites) // 2)]
    evidence = (
        Measurement("forecast/diversity", "", (0.9, 1e-3, 9e-10)),
        Measurement("forecast/loss", "", (5.5, 3.4, 3.3), "nats"),
    )
    return (
        Finding(
            "NS202",
            "tokens-collapse",
            Severity.ERROR,
            (),
            (
                "After 20 Adam steps at 0.001 the tokens of the last hidden state are alike "
                "to 9e-10, and the loss stands at the unigram entropy: nothing is left to learn from."
            ),
            evidence,
            "diversity under 1e-8 while the loss is within 0.1 nats of the unigram entropy",
            "measured: 33 cells, AUC .96 at step 20",
            (
                "Put the norm before each branch (norm_first=True) and one "
                "after the last block, or lower the learning rate to 1e-4."
            ),
        ),
        Finding(
            "NS101",
            "post-ln-deep",
            Severity.WARNING,
            sites,
            (
                f"All {len(sites)} blocks put the norm on the stream after the add "
                "(Post-LN) without a scale that would hold it up at this depth."
            ),
            (),
            "Post-LN deeper than 6 blocks without DeepNorm or Admin",
            "Xiong et al. 2020, arXiv:2002.04745",
            "Use Pre-LN, or DeepNorm's α and β.",
        ),
        Finding(
            "NS303",
            "qk-starved",
            Severity.WARNING,
            half,
            "Query and key weights get 1/4000 of the gradient of the values.",
            (),
            "q/v under 1e-3",
            "Noci et al. 2022",
            "See NS202.",
        ),
        Finding(
            "NS504",
            "eps-small",
            Severity.NOTE,
            sites[-1:],
            "ε = 1e-12 guards nothing in half precision.",
            (),
            "",
            "",
            "",
        ),
    )


def gpt2() -> Any:
    """Twelve Pre-LN blocks, healthy."""
    anatomy = Anatomy((stack("decoder", 12, "pre"),))
    return report(anatomy, measure(anatomy, growth=0.2), forecast=trial(fails=False, anatomy=anatomy))


def post_ln() -> Any:
    """Twelve Post-LN blocks that collapse."""
    anatomy = Anatomy((stack("encoder", 12, "post", prefix="layers", final=False),))
    rows = measure(anatomy, decay=0.55, collapse=0.6)
    findings = collapse_findings(anatomy.blocks)
    return report(
        anatomy,
        rows,
        model="examples/encoder.py:post_ln",
        forecast=trial(fails=True, names=("encoder",), anatomy=anatomy),
        findings=findings,
        verdict="will fail",
    )


def deep(depth: int = 96) -> Any:
    """Ninety-six Peri-LN blocks whose gradient grows towards the input."""
    anatomy = Anatomy((stack("decoder", depth, "peri"),))
    sites = tuple(b.site for b in anatomy.blocks)
    findings = (
        Finding(
            "NS302",
            "gradient-explode",
            Severity.WARNING,
            sites[:30],
            "The gradient grows 900-fold from the top of the stack to its input.",
            (Measurement("gradient/stream", sites[0], 17.9),),
            "ratio over 100",
            "Xiong et al. 2020",
            "Scale the branches by 1/√(2L).",
        ),
        Finding(
            "NS205",
            "attention-saturated",
            Severity.NOTE,
            (sites[depth // 2],),
            "Attention looks at one token.",
            (),
            "entropy under 0.05",
            "",
            "",
        ),
    )
    return report(
        anatomy,
        measure(anatomy, decay=1.075),
        model=f"nn:decoder,scheme=peri,depth={depth}",
        findings=findings,
        verdict="at risk",
        forecast=trial(fails=False, anatomy=anatomy),
    )


def encoder_decoder(up: int = 6, down: int = 6) -> Any:
    """An encoder and a decoder with cross-attention."""
    anatomy = Anatomy(
        (
            stack("encoder", up, "pre", prefix="encoder.block"),
            stack("decoder", down, "pre", prefix="decoder.block", cross=True),
        )
    )
    sites = tuple(b.site for b in anatomy.stacks[1].blocks[:2])
    finding = Finding(
        "NS204",
        "branch-decline",
        Severity.NOTE,
        sites,
        "Cross-attention adds under 1 % to the stream.",
        (),
        "",
        "",
        "",
    )
    return report(
        anatomy,
        measure(anatomy, growth=0.3),
        model="hf:t5",
        findings=(finding,),
        forecast=trial(fails=False, names=("encoder", "decoder"), anatomy=anatomy),
    )


def broken() -> Any:
    """A model that gives NaN half-way up, with much not measured."""
    anatomy = Anatomy(
        (stack("decoder", 8, "pre"),), ("decoder.side: a second stream that joins after block 3",)
    )
    rows = []
    for row in measure(anatomy):
        number = (
            int(row.site.split(".")[1])
            if row.site.startswith("h.") and row.site.split(".")[1].isdigit()
            else 0
        )
        if row.quantity.startswith("gradient"):
            row = not_measured(row.quantity, row.site, "the loss is not finite")
        elif number >= 5 and row.measured:
            row = Measurement(row.quantity, row.site, math.inf if row.quantity == "stream/max" else math.nan)
        rows.append(row)
    rows.append(Measurement("precision/non-finite", "h.5.attn", 1.0))
    finding = Finding(
        "NS506",
        "non-finite",
        Severity.ERROR,
        ("h.5.attn",),
        ("The first value that is not finite is born in h.5.attn: 64 of 4096 logits are NaN."),
        (rows[-1],),
        "any",
        "",
        "Look for a division by zero in this branch's mask.",
    )
    curve = tuple(
        ForecastStep(i, None, 5.5 if i < 3 else math.nan, {"decoder": 0.5 if i < 3 else math.nan})
        for i in range(6)
    )
    forecast = Forecast(
        "diverges", "The loss is not finite from step 3 on.", "adamw", 3e-4, 0, 20, 3.31, curve
    )
    return report(anatomy, rows, findings=(finding,), verdict="will fail", forecast=forecast)


def nothing() -> Any:
    """No stack could be read."""
    finding = Finding(
        "NS104",
        "unread",
        Severity.WARNING,
        (),
        "No residual stream was found.",
        (),
        "",
        "",
        "Give the model's blocks.",
    )
    return report(
        Anatomy((), ("the whole model: no residual add with a parameterised branch",)),
        [],
        findings=(finding,),
        verdict="at risk",
        cost={},
    )


def hostile() -> Any:
    """HTML wherever a user's names can come through."""
    anatomy = Anatomy((stack(HOSTILE, 3, "post", prefix=HOSTILE, scheme=HOSTILE),), (HOSTILE,))
    rows = [
        *measure(anatomy),
        not_measured(HOSTILE, HOSTILE, HOSTILE),
        Measurement(HOSTILE, HOSTILE, 1.0, HOSTILE, HOSTILE),
    ]
    finding = Finding(
        HOSTILE,
        HOSTILE,
        Severity.ERROR,
        (anatomy.blocks[0].site,),
        HOSTILE,
        (rows[-1],),
        HOSTILE,
        HOSTILE,
        HOSTILE,
    )
    forecast = Forecast(
        "collapses", HOSTILE, HOSTILE, 1e-3, 5, 20, 3.3, trial(fails=True, names=(HOSTILE,)).curve
    )
    return report(
        anatomy,
        rows,
        model=HOSTILE,
        input=HOSTILE,
        device=HOSTILE,
        versions={HOSTILE: HOSTILE},
        notes=(HOSTILE,),
        recipe=recipe(HOSTILE),
        findings=(finding,),
        forecast=forecast,
        verdict="will fail",
        cost={HOSTILE: 1.0},
    )


def parallel() -> Any:
    """GPT-J: attention and feed-forward read the same stream; one block only has a dead branch."""
    entry = [Site(f"h.{i}", 0, "ln", 0) for i in range(4)]
    blocks = tuple(
        Block(
            f"h.{i}",
            0,
            (
                branch(f"h.{i}.attn", "attention", "pre", entry=e),
                branch(f"h.{i}.mlp", "feed-forward", "pre", entry=e),
            ),
            e,
            e,
        )
        for i, e in enumerate(entry)
    )
    anatomy = Anatomy((Stack("decoder", blocks, None, entry[0]),))
    rows = [r for r in measure(anatomy) if not (r.site == "h.1.mlp" and r.quantity.startswith("branch/"))]
    rows += [
        Measurement("branch/zero-output", "h.1.mlp", 1.0),
        Measurement("branch/trainable", "h.1.mlp", 0.0),
    ]
    return report(anatomy, rows, model="hf:gptj")


def one_block() -> Any:
    """The smallest model, with DeepNorm's scales."""
    anatomy = Anatomy(
        (stack("encoder", 1, "post", final=False, stream_scale=1.19, join="scaled", scheme="deepnorm"),)
    )
    return report(anatomy, measure(anatomy), model="nn:encoder,scheme=deepnorm,depth=1")


ALL: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (gpt2, post_ln, deep, encoder_decoder, broken, nothing, hostile, parallel, one_block)
}
