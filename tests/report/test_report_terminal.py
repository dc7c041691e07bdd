"""The terminal's report: verdict first, within the width, text that stays text, no colour in a pipe."""

import io
from dataclasses import replace

import pytest
from handmade_reports import report, stack
from rich.console import Console

from normscope.anatomy import Anatomy, Stack
from normscope.probes import Measurement, Measurements, not_measured
from normscope.report import print_markdown, print_report, tables, text_anatomy, text_report
from normscope.report.console import as_text
from normscope.report.sites import compress, in_lines, shorten
from normscope.report.terminal import MOST_ROWS, block_table, folded
from normscope.report.words import gains_in_words
from normscope.rules import Finding, Severity


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("depth", [1, 12, 96])
def test_it_fits_and_starts_with_the_verdict(depth: int, width: int) -> None:
    lines = text_report(report(depth), width).splitlines()
    assert lines[0] == "will fail  hf:gpt2"
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    assert len(lines) < 50
    order = [
        next(i for i, line in enumerate(lines) if word in line) for word in ("NS202", "NS504", "layers.0 ")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize("width", [40, 50, 60, 72])
def test_no_figure_is_cut_in_a_narrow_terminal(width: int) -> None:
    wide, narrow = (" ".join(text_report(report(12), columns).split()) for columns in (200, width))
    cells = "0.12 0.12 0.617 0.45 0.0016 1.25"
    assert f"layers.1 pre {cells}" in wide
    assert "…" not in narrow.partition("layers.0 ")[2]
    row = narrow.partition("layers.1 ")[2].partition("layers.2 ")[0]
    assert [word for word in row.split() if word[0].isdigit()] == cells.split()


@pytest.mark.parametrize("verdict", ["interrupted", "no trial"])
def test_a_check_that_is_not_whole_opens_with_that_word(verdict: str) -> None:
    cut = replace(report(findings=()), verdict=verdict)
    assert text_report(cut, 80).splitlines()[0] == f"{verdict}  hf:gpt2"


def test_sites_that_do_not_fit_stand_on_their_own_line() -> None:
    sites = tuple(f"model.text_model.encoder.layers.{i}.self_attention" for i in range(3))
    finding = Finding("NS205", "attention-saturated", Severity.NOTE, sites, "Gone.")
    lines = text_report(report(findings=(finding,)), 60).splitlines()
    at = lines.index("note    NS205 attention-saturated")
    assert lines[at + 1].startswith("        model.text_model.encoder.layers.0.self_attention")


def test_the_trials_reason_is_said_once() -> None:
    finding = Finding(
        "NS202", "tokens-collapse", Severity.ERROR, (), f"adam at 0.001: {report().forecast.reason}."
    )
    assert text_report(report(findings=(finding,)), 200).count(report().forecast.reason) == 1
    assert text_report(report(findings=()), 200).count(report().forecast.reason) == 1


def test_the_table_has_a_line_a_block_and_folds_a_deep_stack() -> None:
    shown = text_report(report(MOST_ROWS), 80)
    assert all(f"layers.{i} " in shown for i in range(MOST_ROWS))
    deep = text_report(report(96), 80)
    assert "⋮ 84 more" in deep
    assert "layers.5 " in deep
    assert "layers.90 " in deep
    assert "layers.6 " not in deep


@pytest.mark.parametrize("depth", [1, MOST_ROWS, MOST_ROWS + 1, 96])
def test_folding_loses_no_block(depth: int) -> None:
    items = list(folded(report(depth).anatomy.blocks))
    assert sum(item if isinstance(item, int) else 1 for item in items) == depth


def test_figures_of_a_block() -> None:
    line = next(line for line in text_report(report(), 80).splitlines() if line.startswith("layers.1 "))
    assert line.split() == ["layers.1", "pre", "0.12", "0.12", "0.617", "0.45", "0.0016", "1.25"]


def test_what_was_not_measured_is_a_dash() -> None:
    shown = text_report(replace(report(2), measurements=Measurements()), 80)
    line = next(line for line in shown.splitlines() if line.startswith("layers.1 "))
    assert line.split() == ["layers.1", "pre", "–", "–", "–", "–", "–", "–"]


def test_trial_cost_and_notes_are_said() -> None:
    shown = text_report(report(), 140)
    assert (
        "adam at 0.001, 20 steps → collapses; loss of the first batch 5.5 → 5 (unigram entropy 3.31)" in shown
    )
    assert "a single batch is repeated" in shown
    assert "0.2 s (signal 0.2)" in shown


def test_the_budget_is_accounted_for() -> None:
    shown = " ".join(text_report(report(), 140).split())
    assert "standard: 44 of 480 forwards (branches 24, one token 20); left out: density" in shown


def test_gains_of_a_stack_are_said() -> None:
    table = Measurements(
        [
            Measurement("jacobian/sigma-max", "layers", 40.0),
            Measurement("jacobian/log-upper-bound", "layers", 3.0, "log10"),
            Measurement("jacobian/sigma-min-nonzero", "layers", 0.5),
            Measurement("jacobian/condition", "layers", 80.0),
            Measurement("jacobian/rank", "layers", 62.0),
            Measurement("jacobian/token-singular-values", "layers", (2.0, 1.0, 0.0)),
            Measurement("jacobian/token-rank", "layers", 2.0),
            Measurement("jacobian/sigma-max", "layers.0", 7.0),
        ]
    )
    words = gains_in_words("layers", table)
    assert words == (
        "σ_max 40 (its blocks allow 1000); least non-zero σ 0.5, κ 80; rank 62; one token: rank 2 of 3"
    )
    assert gains_in_words("decoder", table) == ""


def test_a_bound_beyond_all_floats_is_left_out() -> None:
    rows = [Measurement("jacobian/sigma-max", "s", 40.0), Measurement("jacobian/log-upper-bound", "s", 400.0)]
    assert gains_in_words("s", Measurements(rows)) == "σ_max 40"


def test_why_a_stack_has_no_gain_is_said() -> None:
    """A wrong backward is the most important note; parts left out by the budget are listed elsewhere."""
    wrong = not_measured("jacobian/sigma-max", "layers", "its derivative is not that of its forward")
    left_out = not_measured("jacobian/sigma-min-nonzero", "layers", "--budget fast leaves it out")
    words = gains_in_words("layers", Measurements([wrong, left_out]))
    assert words == "σ_max not measured: its derivative is not that of its forward"
    assert gains_in_words("layers", Measurements([left_out])) == ""


def test_markup_in_a_name_stays_text() -> None:
    name = "[bold red]evil[/] [link=x]"
    assert name in text_report(report(model=name), 80)


def test_no_colour_in_a_pipe_and_colour_on_a_terminal() -> None:
    pipe, terminal = io.StringIO(), io.StringIO()
    print_report(report(), Console(file=pipe, width=80))
    print_report(report(), Console(file=terminal, width=80, force_terminal=True, color_system="standard"))
    assert "\x1b" not in pipe.getvalue()
    assert "\x1b[1;31mwill fail" in terminal.getvalue()


def test_markdown_in_a_pipe_is_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_markdown("# NS101 post-ln-deep\n")
    assert capsys.readouterr().out == "# NS101 post-ln-deep\n"


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ([], ""),
        (["head"], "head"),
        (["layers.3", "layers.4", "layers.5"], "layers.3…layers.5"),
        (["layers.9", "layers.10", "layers.12"], "layers.9…layers.10, layers.12"),
        (
            ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"],
            "h.0.attn…h.1.attn, h.0.mlp…h.1.mlp",
        ),
        (
            ["e.block.0.layer.0", "e.block.1.layer.0", "e.block.2.layer.0"],
            "e.block.0.layer.0…e.block.2.layer.0",
        ),
        (
            ["stage.0.b.0", "stage.0.b.1", "stage.0.b.2", "stage.1.b.0"],
            "stage.0.b.0…stage.0.b.2, stage.1.b.0",
        ),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], "a.0.b.0…a.1.b.0, a.0.b.1…a.1.b.1"),
        (["albert.layer@1", "albert.layer@2", "albert.layer@3"], "albert.layer@1…albert.layer@3"),
        (["albert.layer", "albert.layer@1", "albert.layer@2"], "albert.layer…albert.layer@2"),
        (
            [f"albert.encoder.layer_groups.0.layer@{i}" for i in (1, 2, 3)],
            "albert.encoder.layer_groups.0.layer@1…@3",
        ),
        (
            [f"model.encoder.layers.{i}.self_attention" for i in (9, 10, 11)],
            "model.encoder.layers.9.self_attention…11.self_attention",
        ),
        (["a", "b", "c", "d", "e", "f"], "a, b, c, d and 2 more"),
        (["x.1", "x.1"], "x.1"),
        (
            [f"blocks.{i}.{b}_residual.norms.{n}" for i in range(4) for b in ("mlp", "attn") for n in "xy"],
            "blocks.0…blocks.3 (16 places)",
        ),
        (
            [f"blocks.{i}.attention_residual.norms.{n}" for i in (0, 1, 3) for n in ("in", "out")],
            "blocks.0…blocks.1, blocks.3 (6 places)",
        ),
    ],
)
def test_sites_in_few_words(sites: list[str], expected: str) -> None:
    assert compress(sites) == expected


@pytest.mark.parametrize(
    ("sites", "width", "lines"),
    [
        ("layers.0…layers.11", 18, ["layers.0…layers.11"]),
        ("layers.0…layers.11", 17, ["layers.0…", "layers.11"]),
        ("model.layers.0, model.layers.2", 17, ["model.layers.0,", "model.layers.2"]),
        ("language_model.layers.10", 16, ["language_model.", "layers.10"]),
        ("a_name_without_any_dot", 9, ["a_name_without_any_dot"]),
        ("swin.layers.0…swin.layers.3 (16 places)", 28, ["swin.layers.0…", "swin.layers.3 (16 places)"]),
        ("", 9, [""]),
    ],
)
def test_long_sites_are_wrapped_at_their_dots(sites: str, width: int, lines: list[str]) -> None:
    assert in_lines(sites, width).split("\n") == lines


DEEP = "language_model_backbone.transformer_decoder_layers"


@pytest.mark.parametrize("width", [60, 80, 110])
def test_paths_keep_what_distinguishes_them(width: int) -> None:
    """Blocks with two placements make the other columns wide."""
    blocks = [replace(block, path=f"{DEEP}.{i}") for i, block in enumerate(stack(4, "post").blocks)]
    pre = replace(blocks[0].branches[0], placement="pre")
    wide = [replace(block, branches=(*block.branches, pre)) for block in blocks]
    anatomy = Anatomy((replace(stack(4, "post"), blocks=tuple(wide)),))
    text = text_anatomy(anatomy, width)
    assert f"{DEEP}.0…3" in "".join(line.split("  ")[0].strip() for line in text.splitlines()[2:])
    assert max(map(len, text.splitlines())) <= width
    values = Measurements()
    rows = {("branch/update-ratio", b.site): 0.12 for block in wide for b in block.branches}
    values.extend(Measurement(quantity, site, value) for (quantity, site), value in rows.items())
    table = as_text(lambda width: [block_table(anatomy.stacks[0], values, width)], width)
    if width > 60:
        ends = ("transformer_decoder_layers.0…", f"{DEEP}.0…3")
        assert any(line.startswith(ends) for line in text.splitlines()), "broken at a dot, or not at all"
        assert [line.split()[0][-9:] for line in table.splitlines()[2:]] == [f"_layers.{i}" for i in range(4)]


def test_a_long_name_keeps_its_end() -> None:
    assert shorten("model.language.layers.11", 10) == "…layers.11"
    assert shorten("layers.11", 10) == "layers.11"


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        ([stack(4, "post", final=False)], "layers: 4 blocks, post (layernorm)"),
        ([stack(4)], "layers: 4 blocks, pre (layernorm), then a final norm"),
        (
            [stack(4, "post", final=False, scheme="deepnorm")],
            "layers: 4 blocks, deepnorm (post, layernorm)",
        ),
        (
            [stack(4, "none", final=False, norm="none", scheme="rezero")],
            "layers: 4 blocks, rezero (no norms)",
        ),
        (
            [replace(stack(2), blocks=stack(1).blocks + stack(1, "post", scheme="keel").blocks)],
            "layers: 2 blocks, pre (layernorm) and keel (post, layernorm), then a final norm",
        ),
    ],
)
def test_the_head_names_the_scheme_where_the_reading_names_one(stacks: list[Stack], words: str) -> None:
    shown = text_report(replace(report(), anatomy=Anatomy(tuple(stacks))), 140).splitlines()
    assert f"model   {words}" in shown


def test_many_figures_with_one_reason_are_counted_instead_of_listed() -> None:
    rows = [not_measured(f"a/{i}", f"blocks.{i}", "too large") for i in range(23)]
    ((quantities, sites, why),) = tables.not_measured(rows, {})
    assert quantities.endswith(", a/19 and 3 more figures")
    assert sites == "blocks.0, blocks.1, blocks.2 and 20 more places"
    assert why == "too large"
    ((quantities, sites, _),) = tables.not_measured(rows[:3], {})
    assert (quantities, sites) == ("a/0, a/1, a/2", "blocks.0, blocks.1, blocks.2")
