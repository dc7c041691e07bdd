"""`normscope diff` on planted differences and on refactorings, by hand.

    python -m benchmarks.diff.runs FILE --set seen --set held-out --set same --set same-held-out
    python -m benchmarks.diff.runs FILE --set fresh --set same-fresh
    python -m benchmarks.diff.runs FILE --set new --set same-new
    python -m benchmarks.diff.runs FILE --set third --set same-third
    python -m benchmarks.diff.runs FILE --set fourth --set same-fourth
    python -m benchmarks.diff.runs FILE --summary
    python -m benchmarks.diff.runs FILE --set seen --only "rotary" --again

FILE gets a line of JSON for each pair; pairs that it has are not run again without `--again`, which replaces
them. Of the sets that are not open only figures are printed. How a pair is judged: `diff.judging`.
"""

import argparse
import contextlib
import json
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.diff import held_out, seen
from benchmarks.diff.fourth import different as fourth
from benchmarks.diff.fourth import same as same_fourth
from benchmarks.diff.fresh import different as fresh
from benchmarks.diff.fresh import same as same_fresh
from benchmarks.diff.judging import judged
from benchmarks.diff.new import different as new
from benchmarks.diff.new import same as same_new
from benchmarks.diff.plants import Build, Case
from benchmarks.diff.ports.t5 import T5Port
from benchmarks.diff.recipes import recipes, same_recipes
from benchmarks.diff.refactorings import cases, parity
from benchmarks.diff.starts import GPT, LLAMA, WIDE, same_starts, starts
from benchmarks.diff.third import different as third
from benchmarks.diff.third import same as same_third
from benchmarks.process import records_of, wilson
from normscope import Run
from normscope.compare.types import Diff
from normscope.subjects import make_subject

LIMIT = 60
"""Seconds that a pair may take; more is an error."""
SETS: dict[str, Callable[[], list[Case]]] = {
    "seen": lambda: [*seen.cases(), *starts(GPT), *recipes(GPT)],
    "same": lambda: [
        *cases(seen.SIZE, 5),
        *parity(seen.SIZE, 5),
        *same_starts(GPT),
        *same_recipes(GPT),
    ],
    "held-out": lambda: [*held_out.cases(), *starts(WIDE), *recipes(LLAMA)],
    "same-held-out": lambda: [
        *cases(held_out.SIZE, held_out.SEED),
        *parity(held_out.SIZE, held_out.SEED),
        *same_starts(WIDE),
        *same_recipes(LLAMA),
    ],
    "fresh": fresh.cases,
    "same-fresh": same_fresh.cases,
    "new": new.cases,
    "same-new": same_new.cases,
    "third": third.cases,
    "same-third": same_third.cases,
    "fourth": fourth.cases,
    "same-fourth": same_fourth.cases,
}
OPEN = ("seen", "same")
"""Sets of which each pair is printed."""


def side(build: Build) -> Any:
    """One side for `normscope.diff`: a spec, a function that builds a module, a Run or a subject."""
    if isinstance(build, str):
        return build
    made = build()
    if isinstance(made, T5Port):  # a port that needs both texts
        ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
        return make_subject(made, {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :24]})
    return made if isinstance(made, Run) else build


def compared(case: Case) -> Diff:
    """The comparison of a pair."""
    from normscope import diff

    return diff(side(case.a), side(case.b), reraise=False)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Context that raises TimeoutError after `LIMIT` seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {LIMIT} s")

    known = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, known)


def pairs(which: str) -> Iterator[Case]:
    """The pairs of a set; a name that comes again gets a number."""
    counts: Counter[str] = Counter()
    for case in SETS[which]():
        counts[case.name] += 1
        number = counts[case.name]
        yield case if number == 1 else replace(case, name=f"{case.name} ({number})")


def run(file: Path, which: str, only: str, *, again: bool) -> None:
    """Run the pairs that the file lacks."""
    known = {r["name"] for r in records_of(file) if r["set"] == which}
    for case in pairs(which):
        if only not in case.name or (case.name in known and not again):
            continue
        begin = time.perf_counter()
        head = {"set": which, "name": case.name, "architecture": case.architecture}
        try:
            with warnings.catch_warnings(), limited():
                warnings.simplefilter("ignore")
                record = head | judged(case, compared(case))
        except Exception as error:
            record = head | {
                "kinds": [t.kind for t in case.truths],
                "error": f"{type(error).__name__}: {error}",
            }
        record["seconds"] = round(time.perf_counter() - begin, 2)
        _write(file, record)


def _write(file: Path, record: dict[str, Any]) -> None:
    """Put a record into the file, in place of one of the same pair."""
    key = ("set", "name")
    kept = [r for r in records_of(file) if any(r[k] != record[k] for k in key)]
    file.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in [*kept, record]))
    if record["set"] in OPEN:
        print(line(record), flush=True)


def line(record: dict[str, Any]) -> str:
    """A pair in a line."""
    if "error" in record:
        return f"ERROR  {record['name']}: {record['error'][:200]}"
    false = f"false {record['false']}" if record["false"] else ""
    if not record["kinds"]:
        left = [part for part, how in record["compared"].items() if how[0] != "whole"]
        return f"{'FALSE' if false else 'same '}  {record['name']}: {false} not whole: {left}"
    marks = "".join("+" if record[key] else "-" for key in ("site", "reason"))
    return f"{marks} {record['named']}  {record['name']}: first {record['first']} {false}"


def share(hits: int, trials: int) -> str:
    """A count with its share and Wilson's interval."""
    low, high = wilson(hits, trials)
    return f"{hits} of {trials} ({100 * hits / max(trials, 1):.0f} %; {100 * low:.0f}–{100 * high:.0f} %)"


def summary(records: list[dict[str, Any]]) -> Iterator[str]:
    """The figures, by set, by kind and by architecture."""
    for which in SETS:
        chosen = [r for r in records if r["set"] == which]
        if not chosen:
            continue
        groups = {which: chosen}
        if "same" not in which:
            for value in sorted({r["architecture"] for r in chosen}):
                groups[f"{which}, {value}"] = [r for r in chosen if r["architecture"] == value]
            for value in sorted({kind for r in chosen for kind in r["kinds"]}):
                groups[f"{which}, {value}"] = [r for r in chosen if value in r["kinds"]]
        for name, group in groups.items():
            yield f"{name}: {'; '.join(figures(group))}"


def figures(group: list[dict[str, Any]]) -> Iterator[str]:
    """The figures of a group of pairs."""
    done = [r for r in group if "error" not in r]
    yield f"{len(group)} pairs, {len(group) - len(done)} errors"
    planted = [r for r in group if r["kinds"]]
    if planted:
        yield f"right site first {share(sum(r.get('site', False) for r in planted), len(planted))}"
        yield f"right reason {share(sum(r.get('reason', False) for r in planted), len(planted))}"
        named = [is_found for r in planted for is_found in r.get("named", [False] * len(r["kinds"]))]
        yield f"plants named with their place {share(sum(named), len(named))}"
        two = [r["named"][1] for r in planted if len(r.get("named", [])) > 1]
        yield f"second plants found {share(sum(two), len(two))}"
    else:
        yield f"nothing reported {share(sum(not r['false'] for r in done), len(group))}"
        whole = [r for r in done if r["compared"].get("function", ["not"])[0] == "whole"]
        yield f"functions compared whole in {len(whole)}"
    false = Counter(name for r in done for name in r["false"])
    yield f"false differences in {sum(bool(r['false']) for r in done)}: {dict(false.most_common(8))}"
    counts = [max(r["forwards"].values()) for r in done if r.get("forwards")]
    if counts:
        yield f"forwards of a model {sorted(counts)[len(counts) // 2]}, at most {max(counts)}"
    seconds = sorted(r["seconds"] for r in done)
    yield f"median {seconds[len(seconds) // 2] if seconds else 0} s"


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", choices=SETS, action="append", default=[])
    parser.add_argument("--only", default="", help="part of the names of pairs")
    parser.add_argument("--again", action="store_true", help="run pairs that the file has again")
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    if options.summary:
        print("\n".join(summary(records_of(options.file))))
        return
    with contextlib.suppress(ImportError):
        import transformers

        transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for which in options.set or ["seen"]:
        run(options.file, which, options.only, again=options.again)


if __name__ == "__main__":
    main()
