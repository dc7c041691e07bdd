"""`run_claims`: claims put to the test in worker processes; what is known is not measured again."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import IO

from normscope.claims.cache import Cache
from normscope.claims.claim import CLAIMS, Claim
from normscope.claims.evidence import Evidence
from normscope.claims.look import Look
from normscope.claims.tested import Tested
from normscope.claims.worker import settings_of

Progress = Callable[[str, int, int], None]


def run_claims(
    claims: Sequence[Claim],
    look: Look,
    *,
    jobs: int = 2,
    cache: Path | None = None,
    fresh: bool = False,
    progress: Progress = lambda stage, done, total: None,
    on_tested: Callable[[Tested], None] = lambda tested: None,
) -> list[Tested]:
    """Put `claims` to the test.

    Args:
        claims: which.
        look: seeds, short or long form, text.
        jobs: processes of one thread each; claims that take times run after the others, one by one.
        cache: folder of what was tested before, by code and environment; None keeps nothing.
        fresh: measure again what is known.
        progress: told what is running, how many are done, and of how many.
        on_tested: given each claim as it is ready; a caller that is interrupted has these.

    Returns:
        In the order of `claims`.
    """
    with contextlib.ExitStack() as stack:
        if cache is None:
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept = Cache(cache)
        look = replace(look, runs=kept.runs())
        found: dict[str, Tested] = {}

        def take(tested: Tested) -> None:
            found[tested.claim.id] = tested
            on_tested(tested)

        for claim in claims:
            known = None if fresh else kept.read(claim, look)
            if known is not None:
                take(known)
        missing = [claim for claim in claims if claim.id not in found]
        for group, hands in (
            ([claim for claim in missing if not claim.alone], jobs),
            ([claim for claim in missing if claim.alone], 1),
        ):
            running: dict[str, None] = {}
            for tested in _tested(group, look, hands, _tell(progress, running, found, len(claims))):
                kept.write(tested, look)
                take(tested)
                running.pop(tested.claim.id, None)
                progress(" ".join(running), len(found), len(claims))
        return [found[claim.id] for claim in claims]


def _tell(
    progress: Progress, running: dict[str, None], found: dict[str, Tested], total: int
) -> Callable[[str], None]:
    def begun(id: str) -> None:
        running[id] = None
        progress(" ".join(list(running)), len(found), total)

    return begun


def _tested(claims: Sequence[Claim], look: Look, jobs: int, begun: Callable[[str], None]) -> Iterator[Tested]:
    """Each claim as it is ready. No worker is left at the end, however it comes."""
    jobs = min(jobs, len(claims))
    if not jobs:
        return
    hands: Queue[Hand] = Queue()
    everyone = [Hand(look) for _ in range(jobs)]
    for hand in everyone:
        hands.put(hand)

    def test(claim: Claim) -> Tested:
        hand = hands.get()
        try:
            begun(claim.id)
            return hand.test(claim)
        finally:
            hands.put(hand)

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(test, claim) for claim in claims]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for hand in everyone:
            hand.end()
        pool.shutdown()


class Hand:
    """A worker process; another takes its place where one dies."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[bytes] | None = None
        self._ended = False

    def test(self, claim: Claim) -> Tested:
        """The claim, tested; a worker that dies of it is said in its `error`."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{claim.id}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return replace(Tested.from_cache(CLAIMS[claim.id], json.loads(answer)), cached=False)
        words = f"its process ended with status {process.wait()}: {self._last_words()}"
        self._process = None
        return Tested(
            claim=claim, evidence=Evidence(unmeasured=[words]), seconds=0.0, long=self._look.long, error=words
        )

    def end(self) -> None:
        """End the worker, whatever it does."""
        self._ended = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._said):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None and not self._ended:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
            self._process = subprocess.Popen(
                [sys.executable, "-m", "normscope.claims.worker", settings_of(self._look)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                encoding="utf-8",
            )
        assert self._process is not None, "a hand that was ended"
        return self._process

    def _last_words(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
