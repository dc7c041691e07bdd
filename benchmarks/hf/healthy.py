"""Findings of `normscope check` on the model types of transformers, small and with random weights.

    python -m benchmarks.hf.healthy [TYPE…] [--half first|held-out] [--variant seed|deep|wide] [--steps 0]
                                    [--every 1] [--output FILE.jsonl]

Each type is checked as a user would, `normscope check hf:FOLDER`, from the config.json of its tiny version
(see `hf.small`). `initializer_range` is widened by √(width / tiny width): the gain of each map stays what its
authors chose. An error or a warning is then a false finding, unless the small size or the random start causes
it. `--steps 20` adds the trial. Findings that hold for the model as transformers starts or trains it are
counted apart, never as clean (`is_true`).

The types are split by the hash of their name: rules may be corrected on the first half, the other one is held
out. A variant is the same list of types with another seed, depth or width.
"""

import hashlib
import inspect
import tempfile
import time
from functools import partial
from math import sqrt
from statistics import fmean
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING

from benchmarks.hf.small import IMAGE, Size, classes_of, shrunk
from benchmarks.hf.types import parser_of, rows_of
from normscope import check, load
from normscope.errors import UsageError
from normscope.rules import Finding

HALVES = ("first", "held-out")
VARIANTS = {
    "usual": (0, Size()),
    "seed": (1, Size()),
    "deep": (2, Size(layers=6)),
    "wide": (3, Size(wide=2)),
}
"""Seed and size of each variant."""


TRUE: dict[str, tuple[frozenset[str], str]] = {
    "cpmant": (
        frozenset({"unscaled-attention"}),
        "init_std is 1: W_Q and W_K start from N(0, 1) behind a norm, so the logits grow with the width",
    ),
    "mobilevit": (
        frozenset({"qk-starved", "tokens-collapse"}),
        "_init_weights draws the gains of BatchNorm from N(0, 0.02), so each of 32 divides the stream by 50",
    ),
    "reformer": (
        frozenset({"later-tokens-leak"}),
        "hashed attention sorts all tokens into chunks, so later tokens decide which earlier ones are seen",
    ),
    "yoso": (
        frozenset({"wrong-derivative"}),
        "YosoCumulation.backward returns a bound of the derivative (Zeng et al. 2021, arXiv:2111.09714)",
    ),
}
"""Type → names of its findings that are true of it, and why."""


def is_true(model_type: str, model: nn.Module, finding: Finding) -> bool:
    """Whether a finding holds for the model as transformers starts or trains it.

    Weights of a module whose forward is decorated with torch.no_grad get no gradient (the indexers of
    DeepSeek sparse attention: transformers has no loss that trains them).
    """
    if finding.name == "no-gradient":
        return all(_is_under_no_grad(model, site) for site in finding.sites)
    return finding.name in TRUE.get(model_type, (frozenset(), ""))[0]


def _is_under_no_grad(model: nn.Module, parameter: str) -> bool:
    parts = parameter.split(".")[:-1]
    owners = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1))
    return any("no_grad" in _source_of(type(each).forward).partition("def ")[0] for each in owners)


def _source_of(function: object) -> str:
    """The source of a function; empty where there is none to read."""
    try:
        return inspect.getsource(function)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


def half_of(model_type: str) -> str:
    """The half that a type belongs to."""
    return HALVES[int(hashlib.sha256(model_type.encode()).hexdigest(), 16) % 2]


def row(model_type: str, steps: int, variant: str = "usual") -> dict[str, Any]:
    """Verdict and findings of a type above a note; the reason where it cannot be loaded."""
    begin = time.monotonic()
    seed, size = VARIANTS[variant]
    found: dict[str, Any] = {"type": model_type, "half": half_of(model_type), "variant": variant}
    try:
        config = shrunk(model_type, size=size)
        next(classes_of(config))
        as_published(config, CONFIG_MAPPING[model_type]())
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            subject = load(f"hf:{folder}", batch_size=2, seq_len=TEXT, seed=seed)
    except Exception as error:
        return found | {"state": "not loaded", "reason": " ".join(str(error).split())[:200]}
    try:
        report = check(subject, steps=steps, budget="fast")
    except UsageError as error:
        return found | {"state": "not checked", "reason": str(error)[:200]}
    above = [f for f in report.findings if f.severity != "note"]
    shown = [
        {"name": f.name, "severity": f.severity, "sites": list(f.sites)[:3], "message": f.message[:300]}
        for f in above
    ]
    seconds = round(time.monotonic() - begin, 2)
    true = bool(above) and all(is_true(model_type, subject.model, each) for each in above)
    found |= {"state": "checked", "verdict": report.verdict, "findings": shown, "true": true}
    return found | {"seconds": seconds}


def as_published(config: Any, full: Any) -> None:
    """Bring a tiny configuration and its parts back to the ratios of the published one, where they matter.

    The random start is widened as the width was cut. Images are large enough for the last stage to hold
    several tokens. Windows of attention are longer than the text, as the published ones are. Factors that the
    authors set by a size (muP) follow the small size.
    """
    for name in getattr(type(config), "sub_configs", {}):
        parts = getattr(config, name, None), getattr(full, name, None)
        if None not in parts:
            as_published(*parts)
    width, published = _width(config), _width(full)
    if isinstance(spread := getattr(config, "initializer_range", None), float):
        config.initializer_range = (spread if spread > LOADED else USUAL) * sqrt(published / width)
    if isinstance(base := getattr(full, "dim_model_base", None), int):  # MiniCPM's muP: arXiv 2404.06395
        config.initializer_range *= sqrt(base / published)
        config.dim_model_base = max(1, round(base * width / published))
    if getattr(config, "sliding_window", None) and isinstance(full.sliding_window, int):
        config.sliding_window = full.sliding_window
    if getattr(config, "image_size", None) == IMAGE:
        config.image_size = LARGER
    if hasattr(config, "attention_multiplier") and hasattr(config, "num_attention_heads"):
        config.attention_multiplier = (
            config.num_attention_heads / config.hidden_size
        )  # 1/d_h, as in Granite 3


def _width(config: Any) -> float:
    """Width of a model; the mean over its stages where they differ, and 1 where none is known."""
    found = (getattr(config, name, None) for name in ("hidden_size", "hidden_sizes", "embed_dims"))
    width = next((each for each in found if each), 1)
    return fmean(width) if isinstance(width, list | tuple) else float(width)


LOADED, USUAL = 1e-6, 0.02
"""A start below the first is a mark of "always loaded" (BLIP, SAM: 1e-10); the second takes its place."""
LARGER = 4 * IMAGE
TEXT = 64
"""Length of the text: what `check` feeds by default."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="take every n-th type")
    parser.add_argument("--half", choices=HALVES, help="types of one half alone")
    parser.add_argument("--variant", choices=list(VARIANTS), default="usual")
    arguments = parser.parse_args()
    chosen = [each for each in arguments.types if arguments.half in (None, half_of(each))]
    one = partial(row, steps=arguments.steps, variant=arguments.variant)
    rows = rows_of(chosen[:: arguments.every], arguments.output, one)
    checked = [each for each in rows if each["state"] == "checked"]
    clean = [each for each in checked if not each["findings"]]
    true = sum(each["true"] for each in checked)
    print(f"{len(checked)} types checked, {len(clean)} without an error or a warning; {true} with true ones")


if __name__ == "__main__":
    main()
