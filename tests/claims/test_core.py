"""Claims are judged by their cases, measured by workers that may die, in a cache that may be gone."""

import ast
import dataclasses
import fcntl
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from planted_runs import STANDS_STILL, planted

from normscope.claims import (
    CLAIMS,
    Case,
    Claim,
    Evidence,
    Figure,
    Kind,
    Plot,
    Runs,
    Sentence,
    Setup,
    Verdict,
    catalogue,
    chosen,
    in_order,
    judge,
    measure_claim,
    run_claims,
)
from normscope.claims import cache as cache_module
from normscope.claims import runs as runs_module
from normscope.claims.cache import Cache, own_code
from normscope.claims.catalogue import CATALOGUE, SCHEMES
from normscope.claims.judge import interval
from normscope.claims.result import ClaimResult as Outcome
from normscope.claims.training import Setting
from normscope.claims.worker import Worker
from normscope.errors import UsageError
from normscope.maps import Cell, Result

HOLDS, CONDITION, REFUTED, UNDECIDED, NONE = Verdict
TWO = Setup(seeds=(0, 1))


def a_case(
    seed: int | None = 0, holds: bool = True, met: bool = True, *, fresh: bool = False, within: bool = True
) -> Case:
    return Case(seed=seed, where="here", value=1.0, holds=holds, met=met, fresh=fresh, within=within)


def effects(*values: float, where: str = "here", met: bool = True, fresh: bool = False) -> list[Case]:
    """A case a seed, of a sentence whose smallest effect is 0.1."""
    return [
        Case(seed=seed + 1000 * fresh, where=where, value=value, holds=value >= 0.1, met=met, fresh=fresh)
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("condition", "cases", "verdict"),
    [
        ("", [], NONE),
        ("", [a_case()], HOLDS),
        ("", [a_case(), a_case(holds=False)], REFUTED),
        ("", [a_case(), a_case(holds=False, met=False)], REFUTED),  # no condition was named
        ("", [a_case(), a_case(holds=False, met=False), a_case(9, fresh=True)], REFUTED),  # nor confirmed
        ("x < 1", [a_case(), a_case(holds=False, met=False), a_case(9, fresh=True)], CONDITION),
        ("x < 1", [a_case(), a_case(holds=False, met=False)], REFUTED),  # nothing confirms the condition
        ("x < 1", [a_case(), a_case(holds=False, met=False), a_case(9, False, fresh=True)], REFUTED),
        ("x < 1", [a_case(holds=False, met=False), a_case(9, fresh=True)], REFUTED),  # fresh cases alone
        ("x < 1", [a_case(), a_case(9, met=False, fresh=True), a_case(holds=False, met=False)], REFUTED),
        ("", [a_case(), a_case(9, False, fresh=True)], REFUTED),
        ("", [a_case(9, fresh=True)], NONE),
        ("", [a_case(), a_case(holds=False, within=False)], HOLDS),  # outside the text's own hypothesis
        ("", [a_case(within=False)], NONE),
        ("x < 1", [a_case(), a_case(holds=False)], REFUTED),
        ("x < 1", [a_case(met=False), a_case(holds=False, met=False)], REFUTED),  # nothing meets it
        ("x < 1", [a_case(met=False), a_case()], HOLDS),
    ],
)
def test_a_law_is_judged_by_all_its_cases(condition: str, cases: list[Case], verdict: Verdict) -> None:
    assert judge(Sentence("it is so", condition), cases).verdict is verdict


@pytest.mark.parametrize(
    ("holding", "verdict", "stable"),
    [("11111", HOLDS, True), ("11110", UNDECIDED, False), ("00000", REFUTED, True), ("10", UNDECIDED, False)],
)
def test_a_tendency_is_judged_seed_by_seed(holding: str, verdict: Verdict, stable: bool) -> None:
    cases = [a_case(seed, holds == "1") for seed, holds in enumerate(holding)]
    judged = judge(Sentence("mostly"), cases, Kind.TENDENCY)
    assert (judged.verdict, judged.is_stable) == (verdict, stable)
    assert judge(Sentence("always"), cases).verdict is (HOLDS if "0" not in holding else REFUTED)


def test_a_tendency_under_a_condition_is_confirmed_by_fresh_seeds() -> None:
    found = [a_case(seed, met=met, holds=met) for seed in (0, 1) for met in (True, False)]
    mostly = Sentence("mostly", "x < 1")
    assert judge(mostly, found, Kind.TENDENCY).verdict is REFUTED
    fresh = [a_case(9, fresh=True)]
    assert judge(mostly, found + fresh, Kind.TENDENCY).verdict is CONDITION, "even where it holds outright"
    fresh.append(a_case(9, holds=False, met=False, fresh=True))
    judged = judge(mostly, found + fresh, Kind.TENDENCY)
    assert judged.verdict is CONDITION
    assert (set(judged.by_seed), judged.cases, judged.met, judged.held) == ({0, 1}, 4, 2, 2)


def test_what_no_seed_draws_belongs_to_every_seed_and_is_counted_once() -> None:
    judged = judge(Sentence("mostly"), [a_case(None, holds=False), a_case(0), a_case(1)], Kind.TENDENCY)
    assert judged.verdict is REFUTED
    assert set(judged.by_seed.values()) == {REFUTED}
    assert judge(Sentence("always"), [a_case(None), a_case(None)]).cases == 2
    assert judge(Sentence("mostly"), [a_case(None)], Kind.TENDENCY).verdict is HOLDS


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (effects(0.3, 0.31, 0.29), HOLDS),
        (effects(0.01, 0.0, 0.02), REFUTED),
        (effects(0.3, -0.2, 0.5), UNDECIDED),
        (effects(0.3, -0.4, 0.2), UNDECIDED),  # the mean alone refutes nothing
        (effects(0.1, 0.1), HOLDS),  # the smallest effect counts
        (effects(5.0), UNDECIDED),  # one seed has no interval
        ([*effects(0.3, 0.31, 0.29), *effects(0.3, -0.2, 0.5, where="there")], UNDECIDED),
        ([*effects(0.01, 0.0, 0.02), *effects(0.3, -0.2, 0.5, where="there")], REFUTED),
        ([*effects(0.3, 0.31, 0.29), *effects(0.0, 0.01, where="there", met=False)], REFUTED),
        (
            [
                *effects(0.3, 0.31, 0.29),
                *effects(0.0, 0.01, where="there", met=False),
                *effects(0.3, 0.31, fresh=True),
            ],
            CONDITION,
        ),
    ],
)
def test_an_effect_is_judged_by_its_interval_in_every_cell(found: list[Case], verdict: Verdict) -> None:
    assert judge(Sentence("it helps", "x < 1", smallest=0.1), found, Kind.TENDENCY).verdict is verdict


def test_replicas_of_a_seed_do_not_narrow_the_interval() -> None:
    found = [replace(case, replica=replica) for case in effects(0.3, 0.1, 0.5) for replica in range(4)]
    (many,) = judge(Sentence("it helps", smallest=0.1), found).effects
    (once,) = judge(Sentence("it helps", smallest=0.1), effects(0.3, 0.1, 0.5)).effects
    assert (many.low, many.mean, many.high, many.seeds) == pytest.approx((once.low, once.mean, once.high, 3))


def test_the_interval_is_students() -> None:
    low, mean, high = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert (high - mean, mean - low) == pytest.approx((4.302652730 / math.sqrt(3),) * 2)


def test_the_counter_example_meets_the_condition_where_one_does() -> None:
    cases = [a_case(0, holds=False, met=False), a_case(1, holds=False)]
    assert judge(Sentence("it is so", "x < 1"), cases).counterexample is cases[1]
    assert judge(Sentence("it is so", "x < 1"), cases[:1]).counterexample is cases[0]
    assert judge(Sentence("it is so"), [a_case()]).counterexample is None


@pytest.mark.parametrize("id", ["Z1", "Z2", "Z3", "Z4", "Z5", "Z8"])
def test_what_is_tested_survives_the_way_through_json(id: str, odd: dict[str, Claim]) -> None:
    tested = measure_claim(odd[id], TWO)
    again = Outcome.from_cache(odd[id], json.loads(json.dumps(tested.to_cache())))
    assert json.dumps(again.to_cache()) == json.dumps(tested.to_cache())
    assert again.to_dict() == tested.to_dict() | {"cached": True}
    json.dumps(tested.to_dict(), allow_nan=False)


def test_the_verdicts_of_the_odd_claims(odd: dict[str, Claim]) -> None:
    verdicts = {id: measure_claim(odd[id], TWO).judgement.verdict for id in ("Z1", "Z2", "Z3", "Z4", "Z5")}
    assert verdicts == {"Z1": HOLDS, "Z2": CONDITION, "Z3": UNDECIDED, "Z4": NONE, "Z5": NONE}
    parts = measure_claim(odd["Z2"], TWO).parts
    assert {name: part.verdict for name, part in parts.items()} == {"refuted": REFUTED, "nothing": NONE}
    assert measure_claim(odd["Z4"], TWO).error is None
    assert measure_claim(odd["Z5"], TWO).error == "RuntimeError: broken <on purpose>"


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(cases=[a_case()]), "no figure"),
        (
            Evidence(cases=[dataclasses.replace(a_case(), part="prnted")], figure=Figure("x", {0: 1.0})),
            "cases of no part of Z1: prnted",
        ),
        (Evidence(cases=[dataclasses.replace(a_case(), holds=1)], figure=Figure("x", {0: 1.0})), "bool"),
    ],
    ids=["no figure", "a part that is not there", "no bool"],
)
def test_evidence_that_would_be_lost_is_an_error(
    evidence: Evidence, words: str, odd: dict[str, Claim]
) -> None:
    tested = measure_claim(dataclasses.replace(odd["Z1"], measure=lambda setup: evidence), TWO)
    assert tested.error is not None
    assert words in tested.error


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["z3", "Z1", "z3"], ["Z1", "Z3"]),
        (["Z2-Z4"], ["Z2", "Z3", "Z4"]),
        (["z4–z2"], ["Z2", "Z3", "Z4"]),
        (["z"], [f"Z{number}" for number in range(1, 9)]),
        (["Z1 "], ["Z1"]),
    ],
)
def test_claims_are_named_in_any_case_and_order(
    words: list[str], ids: list[str], odd: dict[str, Claim]
) -> None:
    assert [claim.id for claim in chosen(words)] == ids


@pytest.mark.parametrize("word", ["A0", "Z9", "Z1-Z99", "A1-Z1", "", "-", "999"])
def test_a_name_of_no_claim_is_refused(word: str, odd: dict[str, Claim]) -> None:
    with pytest.raises(UsageError, match="an id"):
        chosen([word])


def test_a_text_names_the_claims_that_it_makes(odd: dict[str, Claim]) -> None:
    here = chosen(["000"])
    assert [claim.id for claim in here if claim.group == "Z"] == ["Z1", "Z2", "Z3"]
    assert all("000" in {source.text for source in claim.sources} for claim in here)


def test_the_registry_is_sound() -> None:
    ids = [claim.id for claim in in_order()]
    assert len(set(ids)) == len(ids)
    for claim in in_order():
        assert claim.id == f"{claim.group}{claim.number}"
        assert claim.group in "ABC"
        for source in claim.sources:
            assert source.anchor != f"{source.text}-", "an anchor of the page"


def test_one_killed_and_one_broken_claim_cost_the_others_nothing(
    odd: dict[str, Claim], tmp_path: Path
) -> None:
    claims = [odd[id] for id in ("Z6", "Z5", "Z1", "Z4")]
    seen: list[tuple[str, int, int]] = []
    found = run_claims(claims, TWO, jobs=1, cache=tmp_path, progress=lambda *told: seen.append(told))
    assert [tested.claim.id for tested in found] == ["Z6", "Z5", "Z1", "Z4"]
    killed, broken, whole, unmeasured = found
    assert killed.error == "its process died without an answer (killed, or out of memory)"
    assert broken.error == "RuntimeError: broken <on purpose>"
    assert whole.judgement.verdict is HOLDS
    assert unmeasured.reason == "needs a GPU <here>"
    assert seen[0] == ("Z1", 0, 4), "what has a long form goes first"
    assert seen[-1] == ("", 4, 4)
    kept = [path.name[:2] for path in tmp_path.glob("Z*.json")]
    assert kept == ["Z1"], "what failed is tried again"
    _known_needs_no_worker(odd["Z1"], whole, tmp_path)


def _known_needs_no_worker(claim: Claim, before: Outcome, folder: Path) -> None:
    def refuse(self: Worker, claim: Claim) -> Outcome:
        raise AssertionError("asked a worker for what is known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "measure", refuse)
        (again,) = run_claims([claim], TWO, cache=folder)
        assert again.cached
        assert again.to_dict() == before.to_dict() | {"cached": True}
        for other in (
            lambda: run_claims([claim], Setup(seeds=(0,)), cache=folder),
            lambda: run_claims([claim], dataclasses.replace(TWO, long=True), cache=folder),
            lambda: run_claims([claim], TWO, cache=folder, fresh=True),
        ):
            with pytest.raises(AssertionError, match="asked a worker"):
                other()


def test_ctrl_c_leaves_no_worker_and_what_is_ready(
    odd: dict[str, Claim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    running = Worker._running
    monkeypatch.setattr(Worker, "_running", lambda worker: _noted(running(worker), worker, pids))
    ready: list[str] = []

    def interrupt_at(running: str, done: int, total: int) -> None:
        if done == 1 and running == "Z7":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_claims(
            [odd["Z1"], odd["Z7"]],
            TWO,
            jobs=1,
            cache=tmp_path,
            progress=interrupt_at,
            on_ready=lambda tested: ready.append(tested.claim.id),
        )
    assert time.monotonic() - began < 60
    assert ready == ["Z1"]
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _noted(pool: object, worker: Worker, pids: list[int]) -> object:
    assert worker._pid is not None
    pids.append(worker._pid)
    return pool


def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are this process: for what is not about workers."""
    monkeypatch.setattr(Worker, "measure", lambda worker, claim: measure_claim(claim, worker._setup))


def test_a_cache_that_cannot_be_made_is_said_once(
    odd: dict[str, Claim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path | None] = []

    def answer(worker: Worker, claim: Claim) -> Outcome:
        folders.append(worker._setup.runs.folder)
        return measure_claim(claim, worker._setup)

    monkeypatch.setattr(Worker, "measure", answer)
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    found = run_claims(
        [odd["Z1"], odd["Z2"]], TWO, cache=tmp_path / "file" / "claims", on_trouble=said.append
    )
    assert [tested.judgement.verdict for tested in found] == [HOLDS, CONDITION]
    assert len(said) == 1
    assert "Not a directory" in said[0]
    assert all(folder and tmp_path not in folder.parents for folder in folders), "trained runs are shared"


def test_a_disk_that_fills_up_is_said_once(
    odd: dict[str, Claim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch)

    def full(cache: Cache, tested: Outcome, setup: Setup) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Cache, "write", full)
    said: list[str] = []
    found = run_claims([odd["Z1"], odd["Z2"]], TWO, cache=tmp_path, on_trouble=said.append)
    assert len(found) == 2
    assert said == [f"nothing is kept: {tmp_path} (No space left on device)"]


@pytest.mark.parametrize(
    "spoil", [lambda text: "", lambda text: text[:40], lambda text: "{}", lambda text: "[]"]
)
def test_a_spoilt_file_is_measured_again(
    spoil: Callable[[str], str], odd: dict[str, Claim], tmp_path: Path
) -> None:
    cache = Cache(tmp_path)
    cache.write(measure_claim(odd["Z1"], TWO), TWO)
    (path,) = tmp_path.glob("Z1-*.json")
    assert cache.read(odd["Z1"], TWO) is not None
    path.write_text(spoil(path.read_text(encoding="utf-8")), encoding="utf-8")
    assert cache.read(odd["Z1"], TWO) is None


def test_two_at_once_may_write_the_same_claim(odd: dict[str, Claim], tmp_path: Path) -> None:
    tested = measure_claim(odd["Z2"], TWO)
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(20):
                Cache(tmp_path).write(tested, TWO)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert Cache(tmp_path).read(odd["Z2"], TWO) is not None


def test_what_failed_is_not_kept(odd: dict[str, Claim], tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for id in ("Z4", "Z5", "Z1"):
        cache.write(measure_claim(odd[id], TWO), TWO)
    assert [path.name[:2] for path in tmp_path.glob("*.json")] == ["Z1"]


def test_other_seeds_forms_and_texts_have_other_keys(odd: dict[str, Claim], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("some text")
    cache = Cache(tmp_path)
    setups = [TWO, Setup(seeds=(0,)), replace(TWO, long=True), replace(TWO, text=text)]
    paths = {cache._path(odd["Z1"], setup) for setup in setups}
    assert len(paths) == len(setups)
    assert cache._path(odd["Z2"], TWO) not in paths
    assert cache._path(odd["Z1"], Setup(seeds=[0, 1])) in paths


@pytest.mark.parametrize(
    "imports",
    [
        "from normscope.claims.lender import ONE\nfrom normscope.claims.shared import TWO\n",
        "from normscope.claims import lender, shared\n",
        "from normscope.claims import (\n    lender,\n    shared,\n)\n",
        "def later():\n    from normscope.claims.lender import ONE\n",
    ],
)
def test_a_change_of_code_is_a_change_of_key_but_a_comment_or_docstring_is_not(
    odd: dict[str, Claim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: str
) -> None:
    lender, borrower = tmp_path / "lender.py", tmp_path / "borrower.py"
    lender.write_text("ONE = 1\n")
    borrower.write_text(imports)
    (tmp_path / "shared.py").write_text("TWO = 2\n")
    monkeypatch.setattr(cache_module, "ROOM", tmp_path)
    monkeypatch.setattr(cache_module, "_claim_files", lambda: {lender, borrower})
    monkeypatch.setattr(cache_module, "_file", lambda claim: borrower)
    claim = odd["Z1"]

    first = own_code(claim)
    lender.write_text('"""A docstring."""\n\nONE = 1  # a comment\n"""A docstring of ONE."""\n')
    assert own_code(claim) == first
    (tmp_path / "shared.py").write_text("TWO = 3\n")
    assert own_code(claim) == first, "what holds no claim is in the digest that all claims share"
    lender.write_text("ONE = 2\n")
    assert own_code(claim) != first, "what it imports from another claim's module counts"


def test_words_are_no_part_of_the_key_but_a_condition_to_confirm_is(odd: dict[str, Claim]) -> None:
    claim = odd["Z1"]
    words = {"asks": "more", "plots": ({"title": "Another"},)}
    other = replace(claim, sentence=Sentence("Other words.", hypothesis="x > 0"), **words)
    assert own_code(other) == own_code(claim)
    for sentence in (Sentence("It holds.", "x < 1"), Sentence("It holds.", smallest=0.1)):
        assert own_code(replace(claim, sentence=sentence)) != own_code(claim)


def test_a_kept_plot_has_the_claims_present_words(odd: dict[str, Claim], tmp_path: Path) -> None:
    cache, result = Cache(tmp_path), measure_claim(odd["Z1"], TWO)
    cache.write(result, TWO)
    words = {"title": "Another", "x": "blocks", "y": "gain", "levels": {"one": 1.0}}
    found = cache.read(replace(odd["Z1"], plots=(words,)), TWO)
    assert found is not None
    assert found.evidence.plots == [Plot(lines=result.evidence.plots[0].lines, **words)]


def test_only_what_shows_is_left_out_of_the_key() -> None:
    room = cache_module.ROOM
    assert all((room / name).is_file() for name in cache_module.SHOWING)
    assert not {"judge.py", "evidence.py", "claim.py", "setup.py", "runs.py"} & set(cache_module.SHOWING)


def test_no_claim_imports_a_room_that_is_left_out_of_the_key() -> None:
    package, room = cache_module.PACKAGE, cache_module.ROOM
    assert all((package / name).exists() for name in cache_module.ELSEWHERE)
    left_out = {room / name for name in (*cache_module.SHOWING, "__init__.py", "cache.py")}
    left_out |= {package / "__init__.py"}  # imports on first use
    left_out |= {package / "maps" / name for name in ("page.py", "words.py")}  # which only show
    waiting, seen = set(room.glob("*.py")) - left_out, set[Path]()
    while waiting:
        seen.add(file := waiting.pop())
        waiting |= imported_files(file, package) - seen - left_out
    rooms = {path.relative_to(package).parts[0] for path in seen}
    assert {"linalg", "nn", "train"} <= rooms
    assert not rooms & set(cache_module.ELSEWHERE)


def imported_files(file: Path, package: Path) -> set[Path]:
    """Files of the package that a file imports, anywhere in it."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = (package.parent.joinpath(*name.split(".")) for name in names if name.startswith("normscope."))
    return {
        file for path in ours for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()
    }


def test_a_folder_called_transformers_that_is_not_installed_has_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(cache_module, "version", version)
    assert cache_module.environment()["transformers"] == "none"


def test_trained_runs_are_kept_by_their_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    folders = set()
    for words in ("one text, ", "another, "):
        text.write_text(100 * words)
        cache_module._text_digest.cache_clear()
        folders.add(Cache(tmp_path).runs(Setup(text=text)).folder)
    assert len(folders) == 2


def test_what_another_process_trains_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Setting(scheme=scheme, depth=1).config(0) for scheme in ("post", "pre"))
    trained: list[str] = []
    with (tmp_path / f"{Cell(first).shape}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        let_go = threading.Timer(5.0, fcntl.flock, (other, fcntl.LOCK_UN))  # if this waits, it fails
        let_go.start()

        def train(cells: Sequence[Cell], *, early_stop: bool, prepare: object, alike: float) -> list[Result]:
            fcntl.flock(other, fcntl.LOCK_UN)
            trained.extend(cell.scheme for cell in cells)
            return [planted(cell.config, STANDS_STILL) for cell in cells]

        monkeypatch.setattr(runs_module, "train_group", train)
        found = Runs(tmp_path).of([first, second])
        let_go.cancel()
    assert trained == ["pre", "post"]
    assert len(found) == 2


def test_a_part_may_have_a_population_of_its_own() -> None:
    starts = f"starts of the {len(SCHEMES)} schemes, with Xavier weights and with their own"
    assert {name: each.of for name, each in CLAIMS["C8"].sentences.items()} == {
        "": starts,
        "hundred": "schemes",
    }
    assert {each.of for each in CLAIMS["A2"].sentences.values()} == {"norms of real models at their start"}


def test_schemes_added_since_the_claims_were_measured_are_of_the_catalogue() -> None:
    assert set(CATALOGUE) >= catalogue.LATER
    assert set(SCHEMES) | catalogue.LATER == set(CATALOGUE)
