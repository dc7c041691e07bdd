"""The comparison on a terminal: the verdict first, every difference with both values, within the width."""

import io
import re
from dataclasses import replace

import handmade
import pytest
from rich.cells import cell_len
from rich.console import Console

from normscope.cli.output import ERRORS
from normscope.compare.document import to_dict
from normscope.compare.places import Rows
from normscope.compare.text import MOST, print_diff, render_text
from normscope.compare.types import Compared, Diff, Part
from normscope.compare.words import clean, headline, lead, outcome, spelled, values, within


@pytest.fixture(params=handmade.ALL)
def diff(request: pytest.FixtureRequest) -> Diff:
    return handmade.ALL[request.param]()


@pytest.mark.parametrize("width", [40, 80, 140])
def test_it_fits_and_begins_with_the_verdict(diff: Diff, width: int) -> None:
    lines = render_text(diff, width).splitlines()
    assert lines[0].startswith(f"{headline(diff)}:")
    assert max(map(cell_len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


def test_ascii_terminals_take_all_of_it(diff: Diff) -> None:
    shown = render_text(diff, 80).encode("ascii", ERRORS).decode()
    assert headline(diff) in shown


def test_no_character_of_a_name_reaches_the_terminal_as_a_command() -> None:
    shown = render_text(handmade.hostile(), 80)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[red]" in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("same", "The same model: structure, start and recipe agree; the same function to 3e-12."),
        (
            "one",
            "Not the same function: they part in attention of block 0 (transformer.h.0.attn in A, "
            "model.layers.0.self_attn in B), because the norms add ε = 1e-05 to the variance in A and 1e-06 "
            "in B.",
        ),
        ("inserted", "Not the same model: structure (3) differs; recipe and function were not compared."),
        (
            "not_all",
            "No difference was found: structure, recipe and verdict agree; recipe was compared only partly; "
            "start and function were not compared.",
        ),
        (
            "two_stacks",
            "Not the same function: they part in cross-attention of decoder block 0 (decoder.block.0.cross "
            "in A, decoder.layers.0.cross in B), because padding of the encoder is masked in A and seen "
            "in B.",
        ),
        ("interrupted", "Nothing was compared: the comparison was interrupted before this part."),
    ],
)
def test_the_verdict_is_one_sentence(name: str, words: str) -> None:
    assert lead(handmade.ALL[name]()) == words
    assert " ".join(render_text(handmade.ALL[name](), 90).split()).startswith(words)


@pytest.mark.parametrize(
    ("confirmed", "word"), [(True, ", because"), (False, "; a likely reason, not confirmed:"), (None, ":")]
)
def test_only_a_confirmed_reason_is_called_the_reason(confirmed: bool | None, word: str) -> None:
    first = replace(handmade.one().of(Part.FUNCTION)[0], confirmed=confirmed)
    found = lead(replace(handmade.one(), differences=(first,)))
    assert f"model.layers.0.self_attn in B){word} the norms add" in found


def test_a_difference_beside_the_same_function_is_not_called_another_function() -> None:
    only = replace(handmade.same(), differences=handmade.one().of(Part.STRUCTURE))
    words = within(only.differences[0].message)
    assert lead(only) == (
        f"Not the same model: the same function to 3e-12, but structure (1) differs: {words}"
    )


def test_gradients_that_differ_beside_equal_values_are_no_other_function() -> None:
    base = handmade.one()
    parts = handmade.said(base.parts, Part.FUNCTION, "", tolerance=1e-10, largest=1e-12, largest_gradient=0.3)
    found = replace(base, parts=parts)
    assert headline(found) == "Not the same gradients"
    words = "function  1 difference; the gradients differ by up to 0.3 on the residual stream"
    assert words in render_text(found).splitlines()
    assert headline(base) == "Not the same function"


def test_no_part_that_was_left_out_counts_as_the_same() -> None:
    assert outcome(handmade.nothing()) == "not compared"
    assert headline(handmade.not_all()) == "No difference was found"
    partly = tuple(replace(each, how="partly") for each in handmade.same().parts)
    assert headline(replace(handmade.same(), parts=partly)) == "No difference was found"


def test_the_first_parting_leads_and_every_difference_is_there() -> None:
    shown = render_text(handmade.everything(), 110)
    lines = shown.splitlines()
    heads = [line.strip() for line in lines if re.match(r"  \S", line)]
    assert heads[0].startswith(
        "first: rotary-layout (confirmed)  attention of block 0  A halves · B interleaved"
    )
    assert [head.split()[0] for head in heads[1:]] == [
        each.name
        for part in ("function", "structure", "start", "recipe", "verdict")
        for each in handmade.everything().of(Part(part))
        if not each.is_first
    ]
    assert "  norm-eps  blocks 0–11  A 1e-05 · B 1e-06" in lines
    assert "  deviation  attention of blocks 0–11, c_proj.weight | o_proj.weight  A 0.00408 · B 0.02" in lines
    assert "  missing-scale (not confirmed)  feed-forward of block 2  A 1 · B 0.204" in lines
    assert "start      compared partly: 2 of 74 parameters have no partner." in lines


def test_narrow_terminals_get_each_value_on_its_line() -> None:
    lines = render_text(handmade.one(), 40).splitlines()
    at = lines.index("        A 1e-05")
    assert lines[at + 1] == "        B 1e-06"


def test_a_long_part_is_cut_and_says_so() -> None:
    shown = render_text(handmade.many(), 100)
    assert shown.count("  deviation  ") == MOST
    assert f"and {200 - MOST} more; --format json lists all" in shown


@pytest.mark.parametrize("name", ["stack", "blocks", "branch"])
def test_the_verdict_names_what_one_side_lacks(name: str) -> None:
    diff = handmade.one()
    words = "B has 1 of these that A lacks."
    lacking = handmade.difference(Part.STRUCTURE, name, [(None, "h.9")], None, 1, message=words)
    diff = replace(diff, differences=(*diff.differences, lacking))
    assert lead(diff).endswith(f". {words}")
    assert lead(replace(diff, differences=(lacking,))).endswith(f"structure (1) differs: {words}")


def test_parts_that_share_a_reason_are_one_line() -> None:
    shown = " ".join(render_text(handmade.nothing(), 200).split())
    assert "structure, start, recipe, function and verdict: not compared: A takes token ids" in shown


def test_a_part_compared_partly_is_said_once() -> None:
    lines = render_text(handmade.not_all(), 110).splitlines()
    assert [line for line in lines if line.startswith("recipe")] == [
        "recipe     no difference, compared partly: the schedules are not in the reports."
    ]


def test_colour_only_on_a_terminal() -> None:
    pipe, terminal = io.StringIO(), io.StringIO()
    print_diff(handmade.one(), Console(file=pipe, width=80))
    print_diff(handmade.one(), Console(file=terminal, width=80, force_terminal=True, color_system="standard"))
    assert "\x1b" not in pipe.getvalue()
    assert "\x1b[1;31mNot the same function" in terminal.getvalue()


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ([""], "the whole model"),
        ([("h", "layers")], "the stack"),
        ([(None, "model.layers.2"), (None, "model.layers.3")], "blocks 2–3 of B"),
        ([("transformer.h.3", None)], "block 3 of A"),
        ([("transformer.h.3.mlp", None)], "feed-forward of block 3 of A"),
        ([("transformer.h.0.attn", None), ("transformer.h.0.mlp", None)], "block 0 of A"),
        ([("transformer.h.0.attn", "x"), ("transformer.h.0.mlp", "y")], "block 0"),
        (
            [("transformer.h.1.ln", "model.layers.1.n"), ("transformer.h.2.ln", "model.layers.4.n")],
            "blocks 1–2, ln | n",
        ),
        ([("transformer.h.1", "model.layers.1"), ("transformer.h.4", "model.layers.5")], "blocks 1, 4"),
        ([("transformer.wte", "model.embed")], "transformer.wte in A, model.embed in B"),
        ([("lm_head", "lm_head")], "lm_head"),
    ],
)
def test_places_are_folded_over_blocks(sites: list, words: str) -> None:
    rows = Rows(handmade.inserted().rows)
    assert rows.fold(handmade.difference(Part.STRUCTURE, "x", sites, 1, 2)) == words


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        (["encoder", "decoder"], "stacks encoder, decoder"),
        (["encoder.0.attn", "decoder.0.attn"], "attention of encoder block 0, decoder block 0"),
        (
            ["encoder.0.attn", "decoder.0.mlp"],
            "attention of encoder block 0; feed-forward of decoder block 0",
        ),
        (["encoder.0.attn", "encoder.0.mlp", "decoder.1"], "encoder block 0, decoder block 1"),
        (["decoder.0.attn", "decoder.0.cross"], "attention and cross-attention of decoder block 0"),
        (["decoder.0.attn", "decoder.0.cross", "decoder.0.mlp"], "decoder block 0"),
    ],
)
def test_places_in_several_stacks_name_the_branches_that_are_meant(sites: list[str], words: str) -> None:
    model = handmade.two_stacks().rows.a
    rows = Rows(handmade.aligned(model, model))
    full = [
        each.replace("encoder.", "encoder.block.").replace("decoder.", "decoder.block.") for each in sites
    ]
    full = [f"{each[:-4]}SelfAttention" if each.endswith("attn") else each for each in full]
    full = [f"{each[:-3]}DenseReluDense" if each.endswith("mlp") else each for each in full]
    assert rows.fold(handmade.difference(Part.STRUCTURE, "x", [(each, each) for each in full], 1, 2)) == words


def test_calls_of_a_shared_module_are_blocks_of_their_own() -> None:
    shared = handmade.stack(0)
    shared = replace(shared, parts=tuple(handmade.block(f"layer@{i}" if i else "layer") for i in range(3)))
    rows = Rows(handmade.aligned(handmade.model(shared), handmade.model(shared)))
    assert rows.fold(handmade.difference(Part.STRUCTURE, "x", ["layer@1", "layer@2"])) == "blocks 1–2"
    assert rows.fold(handmade.difference(Part.STRUCTURE, "x", ["layer.norm@2"])) == "block 2, norm"


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (1e-5, 1e-6, ("1e-5", "1e-6")),
        (0.0883318, 0.0720435, ("0.08833", "0.07204")),
        (0.02, 0.02 + 1e-9, ("0.02", "0.020000001")),
        (None, "post", ("none", "post")),
        (True, False, ("yes", "no")),
        ({"gains": 0.0, "biases": 0.1}, {"gains": 0.1, "biases": 0.1}, ("gains 0", "gains 0.1")),
        ({"gains": 0.0}, {}, ("gains 0", "none")),
        (["q", "k"], [], ("q, k", "none")),
        (float("nan"), 3, ("nan", "3")),
        ([0.5, 0.5], [0.25, 0.5], ("0.5", "0.25, 0.5")),
        ([1, 1, 2], [1, 1, 3], ("1, 1, 2", "1, 1, 3")),
        (list(range(12)), [], ("0, 1, … 11 (12 values)", "none")),
    ],
)
def test_both_values_show_their_difference(a: object, b: object, words: tuple[str, str]) -> None:
    assert values(handmade.difference(Part.RECIPE, "x", [""], a, b)) == words


def test_a_value_of_a_fact_has_the_words_of_the_fact() -> None:
    assert spelled(True, "tied_head") == "the embedding's"


def test_long_values_are_cut() -> None:
    shown = values(handmade.difference(Part.RECIPE, "x", [""], "a" * 500, "b"))
    assert shown is not None
    assert len(shown[0]) == 80


@pytest.mark.parametrize(
    ("words", "inside"),
    [
        ("The norm", "the norm"),
        ("A has none", "A has none"),
        ("GELU is", "GELU is"),
        ("LayerNorm is", "LayerNorm is"),
    ],
)
def test_a_sentence_within_another_keeps_names(words: str, inside: str) -> None:
    assert within(words) == inside


def test_cleaning_keeps_everything_else() -> None:
    diff = handmade.everything()
    assert to_dict(clean(diff)) == to_dict(diff)
    assert clean(Compared(Part.START, "not", ("a\nb\x00",))).why == ("a b?",)
