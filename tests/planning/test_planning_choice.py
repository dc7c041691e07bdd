"""The choice is the cheapest of all choices, sizes are read, and what does not fit says what would."""

import dataclasses
import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import normscope
import normscope.subjects
from normscope.anatomy import Anatomy
from normscope.cli.main import run
from normscope.errors import UsageError
from normscope.planning import Held, in_words, parse_bytes, plan, recompute
from normscope.planning.choosing import Moments, Option, cheapest, options_of
from normscope.planning.making import with_loss
from normscope.planning.result import WITHOUT_DEVICE
from normscope.planning.search import measured
from normscope.planning.stand_in import fake_stand_in, real_stand_in, to_read
from normscope.planning.step import Step, makes
from normscope.planning.tracker import Tracker
from normscope.planning.units import groups_of
from normscope.planning.words import shortened, text
from normscope.subjects.feed import tensors_in

SPEC = "nn:decoder,depth=3,width=64,heads=2"


def fits(moments: Moments, chosen: tuple[Option, ...], room: int) -> bool:
    """Whether no moment takes more than `room`, written out."""
    kept = moments.before
    for option, gradients in zip(chosen, moments.gradients, strict=True):
        if kept + option.again + gradients > room:
            return False
        kept += option.kept
    return kept + moments.loss <= room


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_cheapest_of_all(seed: int) -> None:
    draw = random.Random(seed)
    menus = tuple(
        tuple(Option((), draw.randrange(90), draw.randrange(90), draw.randrange(50)) for _ in range(3))
        for _ in range(5)
    )
    gradients = tuple(sorted((draw.randrange(80) for _ in menus), reverse=True))
    moments = Moments(menus, gradients, draw.randrange(10), draw.randrange(60))
    room = draw.randrange(100, 450)
    chosen = cheapest(moments, room)
    possible = [each for each in itertools.product(*menus) if fits(moments, each, room)]
    if chosen is None:
        assert not possible
    else:
        assert fits(moments, tuple(chosen), room)
        assert sum(o.cost for o in chosen) == min(sum(o.cost for o in each) for each in possible)


@pytest.mark.parametrize(
    ("given", "count"),
    [("16GB", 16 * 10**9), ("24GiB", 24 * 2**30), ("1.5 mb", 1_500_000), ("500MB", 5 * 10**8), (4096, 4096)],
)
def test_sizes(given: str | int, count: int) -> None:
    assert parse_bytes(given) == count


@pytest.mark.parametrize("given", ["16XB", "", "-1GB", "GB", "0", "nan", "1e400GB", "16 G B", "16", True])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="expected a size such as 16GB, 500MB or 24GiB; write a number"):
        parse_bytes(given)


def test_sizes_in_words() -> None:
    assert [in_words(n) for n in (0, 1023, 1024, 3 * 2**29)] == ["0 B", "1,023 B", "1.0 KiB", "1.5 GiB"]


@pytest.fixture(scope="module")
def peak() -> int:
    """The peak of `SPEC` without a limit."""
    return plan(SPEC).peak


def test_less_memory_costs_more_time(peak: int) -> None:
    shares = (1.0, 0.85, 0.7)
    made = [plan(SPEC, int(share * peak)) for share in shares]
    assert made[0].recompute == ()
    assert made[0].peak == peak
    times = [each.added_time for each in made]
    assert times == sorted(times)
    assert all(each.peak <= share * peak for each, share in zip(made, shares, strict=True))


def test_the_batch_that_an_error_names_fits_and_twice_as_many_do_not() -> None:
    spec = "nn:decoder,depth=1,width=64,heads=2"  # the search plans many batch sizes
    limit = plan(spec, batch_size=4).peak
    with pytest.raises(UsageError, match="use --batch-size ") as caught:
        plan(spec, limit, batch_size=16)
    largest = int(caught.value.do.partition("--batch-size ")[2].partition(",")[0])
    assert plan(spec, limit, batch_size=largest).peak <= limit
    with pytest.raises(UsageError):
        plan(spec, limit, batch_size=2 * largest)


def test_the_least_memory_that_an_error_names_is_enough() -> None:
    stays = plan(SPEC).before.stays
    with pytest.raises(UsageError) as caught:
        plan(SPEC, sum(stays.values()) + stays[Held.PARAMETERS] + 1000)  # with gradients, and nothing else
    least = caught.value.expected.removeprefix("at least ").partition(",")[0]
    assert plan(SPEC, int(parse_bytes(least) * 1.01)).recompute


def test_weights_alone_can_be_too_much() -> None:
    """No recomputation changes that, and without weights and gradients alone fitting, no optimizer does."""
    state = plan(SPEC, optimizer="adamw").before.stays[Held.OPTIMIZER]
    weights = plan(SPEC, optimizer="sgd").before.stays[Held.PARAMETERS]
    with pytest.raises(UsageError, match=r"at any batch size; take an optimizer with less state than"):
        plan(SPEC, 2 * weights + state // 2)
    with pytest.raises(UsageError, match=r"at any batch size; take a smaller model") as caught:
        plan(SPEC, "1KB")
    assert "in 1KB (1,000 B)" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adamm"}, 'nearest name is "adam"'),
        ({"precision": "int8"}, "float32 | bfloat16 | float16"),
        ({"memory": "lots"}, "a size such as 16GB"),
        ({"loss_fn": torch.mean}, "a module with its batch"),
    ],
)
def test_bad_arguments(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(SPEC, **options)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_an_optimizer_of_ones_own() -> None:
    made = plan(SPEC, optimizer=lambda model: torch.optim.RMSprop(model.parameters()))
    assert made.optimizer == "<lambda>"
    assert made.peak > plan(SPEC, optimizer=lambda model: torch.optim.SGD(model.parameters())).peak


def test_a_plan_is_applied_and_undone() -> None:
    subject = normscope.load(SPEC)
    made = normscope.plan(subject, int(0.8 * normscope.plan(subject).peak))
    kinds = [type(m) for m in subject.model.modules()]
    with made.apply(subject.model) as applied:
        assert applied.paths == made.recompute
        assert [type(m) for m in subject.model.modules()] != kinds
    assert [type(m) for m in subject.model.modules()] == kinds


def test_without_an_anatomy_the_items_of_the_longest_list_are_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    groups = groups_of(model, Anatomy(()))
    assert [group.block.path for group in groups] == ["1.0", "1.1", "1.2"]


def test_paths_in_a_row_are_one() -> None:
    assert shortened(["h.0", "h.1", "h.2", "h.4", "h.1.mlp", "top"]) == ["h.0–2", "h.4", "h.1.mlp", "top"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    assert run(["plan", SPEC, "--memory", "6MB", "-o", str(target)]) == 0
    read = json.loads(target.read_text())
    assert read["after"]["peak"] <= 6_000_000
    assert run(["plan", SPEC, "--memory", "6MB"]) == 0
    shown = capsys.readouterr().out
    assert "after the blocks: logits and loss" in shown
    assert "Not included: memory of the framework" in shown
    assert run(["plan", SPEC, "--memory", "100KB"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "in 100KB" in error


def live_after_forward(step: Step) -> int:
    """Bytes of activations that are alive when the forward pass has ended."""
    tracker = Tracker()
    before = [
        *step.subject.model.parameters(),
        *step.subject.model.buffers(),
        *tensors_in(step.subject.batch),
    ]
    tracker.hold(before, Held.PARAMETERS)
    with tracker:
        loss = step._loss()
    assert loss.requires_grad
    return tracker.live[Held.ENDS]


_HF = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=128,vocab_size=300"
KEEPING = (
    "nn:decoder,depth=2,width=64,heads=2",
    "nn:decoder,scheme=post,depth=2,width=64,heads=2,dropout=0.1",
    "hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=300",
    f"hf:llama,{_HF},num_key_value_heads=2",
    f"hf:bert,{_HF}",
)
STATE = 6000
"""Bytes of the random generator's state, which each recomputed module keeps."""


@pytest.mark.parametrize("spec", KEEPING)
def test_an_option_keeps_what_it_says(spec: str) -> None:
    subject = normscope.load(spec, batch_size=8, seq_len=64, fake=True)
    with fake_stand_in(subject):
        groups = groups_of(subject.model, normscope.read_anatomy(to_read(subject)))
        step = Step(subject, makes("sgd"), "float32")
        saved = step.record(groups)
        as_is = live_after_forward(step)
        for group in groups:
            nothing, *options = options_of(group, saved)
            assert options
            for option in options:
                with recompute(subject.model, [unit.path for unit in option.units]):
                    freed = as_is - live_after_forward(step)
                said = nothing.kept - option.kept
                assert freed == pytest.approx(said, abs=STATE * len(option.units)), option.units


@pytest.mark.parametrize("spec", KEEPING)
def test_an_option_costs_what_it_says(spec: str) -> None:
    """The work that is predicted from the first run is that of the second run, as it is followed."""
    subject = normscope.load(spec, batch_size=8, seq_len=64, fake=True)
    with fake_stand_in(subject):
        groups = groups_of(subject.model, normscope.read_anatomy(to_read(subject)))
        step = Step(subject, makes("sgd"), "float32")
        saved = step.record(groups)
        as_is = step.measure(groups).work
        alone = [each for each in options_of(groups[0], saved) if len(each.units) == 1]
        assert alone
        for option in alone:
            (unit,) = option.units
            found, said = measured(step, groups, saved, [unit.path]).footprint.work, saved.work[unit]
            added = found.minus(as_is)
            assert (added.flops, added.written) == (said.flops, said.written), unit
            assert added.calls == pytest.approx(said.calls, rel=0.2), unit
            assert option.cost == said.cost


def test_work_without_values_is_that_of_real_tensors() -> None:
    """Fake tensors also ask for their device, which is no work."""
    subject, works = normscope.load(KEEPING[0]), []
    for stand_in in (fake_stand_in, real_stand_in):
        with stand_in(subject) as model:
            step = Step(model, makes("sgd"), "float32")
            step.record(())
            works.append(step.measure().work)
    assert works[0] == works[1]


def test_a_limit_is_used() -> None:
    """The room is lowered until the choice changes: all modules would fit too, at a higher cost."""
    spec = "hf:vit,hidden_size=128,num_hidden_layers=4,num_attention_heads=4,intermediate_size=256"
    limit = int(0.8 * plan(spec, optimizer="muon", batch_size=8).peak)
    made = plan(spec, limit, optimizer="muon", batch_size=8)
    assert 0.9 * limit < made.peak <= limit


class Scaled(nn.Module):
    """A branch whose input is saved by nothing: a multiple of it is."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(64, 64)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.map(2 * x_BD).tanh()


def test_an_input_that_nothing_else_saves_is_kept_for_the_second_run() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(Scaled(), Scaled(), Scaled()))
    subject = with_loss(normscope.subjects.make_subject(model, torch.randn(512, 64)))
    with fake_stand_in(subject) as fake:
        groups = groups_of(fake.model, Anatomy(()))
        step = Step(fake, makes("sgd"), "float32")
        saved = step.record(groups)
        nothing, whole = options_of(groups[0], saved)
        as_is = live_after_forward(step)
        with recompute(fake.model, [groups[0].block.path]):
            freed = as_is - live_after_forward(step)
    state = 512 * 64 * 4
    assert nothing.kept - whole.kept == state  # two states less, and the input more
    assert freed == pytest.approx(state, abs=STATE)


def test_a_plan_prints_as_the_command_shows_it() -> None:
    made = plan(SPEC)
    assert str(made) == text(made)


@pytest.mark.parametrize("width", [30, 40, 60, 72])
def test_in_a_narrow_terminal_no_figure_is_broken(width: int, peak: int) -> None:
    made = plan(SPEC, int(0.8 * peak))
    lines = text(made, width).splitlines()
    assert max(map(len, lines)) <= width
    for figure in set(re.findall(r"\d[\d.,]* [KMG]?i?B\b", text(made))):
        assert any(figure in line for line in lines), figure
    assert "\n".join(text(made, 400).splitlines()) + "\n" == text(made)


def test_the_scope_of_the_peak_stands_beside_it() -> None:
    made = plan(SPEC)
    head, _, rest = text(made).partition("\n\n")
    assert "Peak of a training step" in head
    assert "On a GPU, dropout" in head
    assert "Not included" in head
    assert "dropout" not in rest
    assert "On a GPU" not in text(dataclasses.replace(made, device="cuda"))
    too_large = text(dataclasses.replace(made, notes=(WITHOUT_DEVICE,)))
    assert "a CPU's, because the device cannot hold the weights. On a GPU, dropout" in too_large
    assert "--device cuda" not in too_large
    assert "Note:" not in too_large


@pytest.mark.parametrize("command", ["plan", "anatomy", "diff", "train", "map"])
@pytest.mark.parametrize(
    "words", ["-- python train.py --lr 3", "-- torchrun train.py", "nn:decoder -- train.py"]
)
def test_a_script_is_refused_with_what_to_do(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        f"{command} {words[words.index('--') :]}: expected a MODEL, because only check and watch take" in said
    )
    assert "`normscope init train.py` does" in said
    assert ("call normscope.plan in the script" in said) == (command == "plan")


def test_a_model_may_still_stand_behind_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--", "nn:decoder,depth=1,width=16,heads=2"]) == 0
    assert "Peak of a training step" in capsys.readouterr().out
