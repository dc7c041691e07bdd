"""The catalogue of schemes: a table or one scheme in full on the terminal, and the page docs/schemes.md."""

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from normscope.nn.catalogue import SAMPLE_DEPTH, Row
from normscope.report.console import as_text, show

_LEGEND = """\
N is a norm, F a branch (attention or feed-forward), x the stream, l the block or sublayer, L their number.
Slots of a norm: entry is after the embedding, branch_in before a branch, branch_out after it, stream after
the addition, final after the last block.
"""
_HEAD = f"""\
# Schemes

These are the published ways of placing norms and joining branches that normscope can build, each with its
formula, initialisation and source. `normscope schemes` prints this table, `normscope schemes NAME` one
scheme. To build a model: `nn:decoder,scheme=NAME`, or `normscope.nn.build("decoder", scheme="NAME")`.

{_LEGEND}
Norms and factors that depend on depth are shown for {SAMPLE_DEPTH} blocks. *Read as* is the name that
`normscope anatomy` gives a model of that scheme: its own name, or the class whose dataflow it shares.

`normscope schemes --format markdown > docs/schemes.md` writes this page from `normscope.nn.SCHEMES`.
"""
_OPTIONS = (
    (
        "`attention_gate=head` or `element`",
        "`o(σ(W x) ⊙ attention(x))`, one gate for each head, or for each feature",
        "Qiu et al. 2025, arXiv:2505.06708, as in their code; with a bias unless `bias=false`",
    ),
    (
        "`value_residual=half`",
        "v of block l ≥ 2 is `½v + ½v₁`, v₁ the values of block 1",
        "Zhou et al. 2024 (ResFormer), arXiv:2410.17897, as in their code",
    ),
    (
        "`value_residual=learnt`",
        "`(1 − λ)v + λv₁`, one λ for each block, ½ at the start",
        "modded-nanogpt's record of 2024-11-06",
    ),
    (
        "`z_loss=1e-4`",
        "loss of train mode: cross-entropy + `z_loss · mean log² Z`, Z = Σ exp(logits)",
        "Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, as in OLMo's code",
    ),
    (
        "`residual_warmup=1000`",
        "`x + α F(…)`, `α = min(t/(T·l), 1)` in step t, from 1, T = 1000; `after_step` counts",
        "Chen et al. 2026 (ProRes), arXiv:2603.05369, as in their code, which counts t from 0",
    ),
    (
        "`qk_clip=100`",
        "after each step `W_q`, `W_k` of a head × `√min(1, τ/S)`, S its largest logit in the step",
        "Kimi Team 2025 (Kimi K2), arXiv:2507.20534, as in Megatron-LM; not with `qk_norm`",
    ),
    (
        "`norm=seednorm`, `bhyt`, `dyt`, `derf`, …",
        "another norm in the slots of a scheme",
        "the schemes of these names",
    ),
)
"""Option of the models, its formula and its source."""
_READ_IN = (
    ("`attnres`, `block-attnres`", "the authors' pseudocode, in copies of their README; other people's code"),
    ("`mhc-lite`, `kromhc`, `bhyt`, `residual_warmup`", "the authors' code"),
    ("`attention_gate`, `value_residual=half`", "the authors' code"),
    (
        "`nanochat`, `value_residual=learnt`",
        "the code of nanochat (July 2026) and modded-nanogpt (November 2024)",
    ),
    ("`qk_clip`, `z_loss`", "the code of Megatron-LM and x-transformers, and of OLMo; not the papers"),
    ("`seednorm`", "a transcription of the paper, without its initial values: α = 1 is a guess of ours"),
)
"""Recent schemes and options, and where their formulas were read."""
_FOOT = f"""
## Options

These go with any scheme: `nn:decoder,scheme=pre,attention_gate=head`, or in Python
`build("decoder", attention_gate="head")`.

| option | formula | source |
|---|---|---|
{chr(10).join(f"| {' | '.join(row)} |" for row in _OPTIONS)}

## Where recent formulas were read

| scheme or option | read in |
|---|---|
{chr(10).join(f"| {' | '.join(row)} |" for row in _READ_IN)}

## Not built

Published schemes whose formula could not be found in full, in reference code or in the paper's text:

- **SpanNorm** (Wang et al. 2026, arXiv:2601.22580). Only the abstract was found. It names a residual that
  spans the whole block, a norm of the sum at its end, and a scaling by depth; the scaling was not found.
"""


def print_schemes(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the table, or one scheme in full where there is one row."""
    show(lambda width: _parts(rows), console)


def text_schemes(rows: Sequence[Row], width: int = 100) -> str:
    """The same as plain text of `width` columns, for a file."""
    return as_text(lambda width: _parts(rows), width)


def page_of_schemes(rows: Sequence[Row]) -> str:
    """docs/schemes.md: a table of all schemes, then a section for each."""
    lines = ["| name | one sublayer | norms | join | final norm |", "|---|---|---|---|---|"]
    for row in rows:
        # A bar would end the cell.
        formula, placement = (words.replace("|", "\\|") for words in (row.formula, row.placement))
        final = _yes(row.final_norm)
        lines.append(f"| [{row.name}](#{row.name}) | `{formula}` | {placement} | {row.join} | {final} |")
    for row in rows:
        lines += ["", f"## {row.name}", ""]
        lines += [f"- **{label}**: {words}" for label, words in _lines(row, "`")]
    return "\n".join([_HEAD, *lines, _FOOT])


def _parts(rows: Sequence[Row]) -> Iterator[RenderableType]:
    if len(rows) == 1:
        yield Text(rows[0].name, style="bold")
        grid = Table.grid(padding=(0, 2))
        for label, words in _lines(rows[0]):
            grid.add_row(Text(label, style="dim"), Text(words))
        yield grid
        return
    table = Table(show_edge=False, show_lines=True, pad_edge=False, expand=True)
    table.add_column("scheme", style="bold", no_wrap=True)
    for column, ratio in (("one sublayer; weights; source", 60), ("norms; how the branch joins", 22)):
        table.add_column(column, overflow="fold", ratio=ratio)
    for row in rows:
        table.add_row(
            Text(row.name),
            Text.assemble(row.formula, "\n", (f"{row.initialisation}\n{row.source}", "dim")),
            Text.assemble(row.placement, "\n", (f"join: {row.join}", "dim")),
        )
    yield table
    yield Text()
    yield Text(_LEGEND + "`normscope schemes NAME` shows one in full.", style="dim")


def _lines(row: Row, quote: str = "") -> list[tuple[str, str]]:
    """Everything there is to say about one scheme; `quote` stands around the formula."""
    return [
        ("one sublayer", f"{quote}{row.formula}{quote}"),
        ("norms", row.placement),
        ("kind of norm", row.norm or "any"),
        ("join", row.join),
        ("weights", row.initialisation),
        ("inside the branches", row.inside or "unchanged"),
        ("in addition", row.besides or "nothing"),
        ("ends in a norm", _yes(row.final_norm)),
        ("read as", row.reads_as),
        ("source", row.source),
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
