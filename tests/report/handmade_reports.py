"""Reports to show: written by hand, no model and no probe behind them."""

from normscope.anatomy import Anatomy, Block, Branch, Norm, Site, Stack
from normscope.forecast import Forecast, ForecastStep
from normscope.probes import Measurement, Measurements, not_measured
from normscope.report import Report
from normscope.rules import Finding, Severity, verdict

BUDGET = {
    "name": "standard",
    "limit": 480,
    "forwards": 44.0,
    "parts": {
        "branches": {"forwards": 24.0, "seconds": 1.5},
        "one token": {"forwards": 20.0, "seconds": 2.5},
    },
    "left_out": {"density": "--budget standard leaves it out: needs --budget deep"},
}
SITE = Site("", 0, "aten.add.Tensor", 0)
FINAL = Norm("layernorm", "norm", SITE, SITE, 1e-5, "norm.weight")


def branch(path: str, kind: str = "attention", placement: str = "pre", **more: object) -> Branch:
    fields = {"norm": "layernorm", "call": 0, "join": "add", "stream_scale": None, "branch_scale": None}
    fields |= {"scheme": None, "entry": SITE, "output": SITE, "sum": SITE} | more
    return Branch(kind=kind, placement=placement, path=path, **fields)  # type: ignore[arg-type]


def stack(
    depth: int, placement: str = "pre", final: bool = True, name: str = "layers", **more: object
) -> Stack:
    blocks = tuple(
        Block(
            f"{name}.{i}",
            0,
            (
                branch(f"{name}.{i}.attn", "attention", placement, **more),
                branch(f"{name}.{i}.mlp", "feed-forward", placement, **more),
            ),
            SITE,
            SITE,
        )
        for i in range(depth)
    )
    return Stack(name, blocks, FINAL if final else None, SITE)


def measured(anatomy: Anatomy) -> Measurements:
    rows = [
        Measurement(quantity, block.site, value / (1 + i))
        for i, block in enumerate(anatomy.blocks)
        for quantity, value in (
            ("stream/rms", 1.2345),
            ("stream/diversity", 0.9),
            ("gradient/stream", 3.2e-3),
            ("jacobian/sigma-max", 2.5),
        )
    ]
    rows += [Measurement("branch/update-ratio", b.site, 0.123) for b in anatomy.branches]
    rows.append(Measurement("jacobian/token-singular-values", "layers", (2.0, 1.0, float("inf"))))
    rows.append(Measurement("gradient/total", "", float("nan")))
    rows.append(not_measured("jacobian/rank", anatomy.blocks[0].site, "too large"))
    return Measurements(rows)


def trial() -> Forecast:
    curve = tuple(
        ForecastStep(
            step, None if step == 0 else 5.0 - step / 10, 5.5 - step / 10, {"layers": 10.0 ** (-step)}
        )
        for step in (0, 5)
    )
    return Forecast("collapses", "diversity is 1e-09 after 20 steps.", "adam", 1e-3, 0, 20, 3.31, curve)


RECIPE = {
    "own": True,
    "optimizers": [
        {
            "name": "[red]Lion",
            "groups": [{"tensors": 2, "parameters": 9, "lr": 0.1, "betas": [0.9, 0.99], "eps": None}],
        }
    ],
    "schedule": "LambdaLR",
    "warmup": 3,
    "run_steps": 100,
    "clip": None,
    "accumulation": 1,
    "precision": "float32",
}


def report(depth: int = 12, model: str = "hf:gpt2", findings: tuple[Finding, ...] | None = None) -> Report:
    anatomy = Anatomy((stack(depth),), unread=())
    table = measured(anatomy)
    if findings is None:
        sites = tuple(block.site for block in anatomy.blocks[3:9])
        evidence = (Measurement("forecast/diversity", "layers", float("-inf")),)
        findings = (
            Finding(
                "NS202",
                "tokens-collapse",
                Severity.ERROR,
                sites,
                "Gone: 1e-9.",
                evidence,
                "1e-8",
                "us",
                "Do.",
            ),
            Finding("NS504", "eps-small", Severity.NOTE, (), "ε = 1e-12.", remedy="Use 1e-5."),
        )
    return Report(
        model=model,
        input="4 × 64 byte ids",
        seed=0,
        device="cpu",
        versions={"torch": "2.13.0"},
        anatomy=anatomy,
        measurements=table,
        forecast=trial(),
        recipe=RECIPE,
        findings=findings,
        verdict=verdict(findings),
        cost={"signal": 0.25, "total": 0.25},
        budget=BUDGET,
        notes=("a single batch is repeated",),
    )
