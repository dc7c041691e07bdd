"""`run_claims`: claims measured in worker processes; what is in the cache is not measured again."""

import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import Queue

from normscope.claims.cache import Cache
from normscope.claims.claim import Claim
from normscope.claims.result import ClaimResult
from normscope.claims.setup import Setup
from normscope.claims.worker import Worker

Progress = Callable[[str, int, int], None]


def run_claims(
    claims: Sequence[Claim],
    setup: Setup,
    *,
    jobs: int = 2,
    cache: Path | None = None,
    fresh: bool = False,
    progress: Progress = lambda stage, done, total: None,
    on_ready: Callable[[ClaimResult], None] = lambda tested: None,
    on_trouble: Callable[[str], None] = lambda words: None,
) -> list[ClaimResult]:
    """Measure `claims`.

    Args:
        claims: which.
        setup: seeds, short or long form, text.
        jobs: processes of one thread each.
        cache: folder of what was tested before, by code and environment; None keeps nothing.
        fresh: measure again what is known.
        progress: told what is running, how many are done, and of how many.
        on_ready: given each result as it is ready; a caller that is interrupted has these.
        on_trouble: told, once, why nothing can be kept.

    Returns:
        In the order of `claims`.
    """
    with contextlib.ExitStack() as stack:
        kept = None if cache is None else Cache(cache)
        read = {} if fresh or kept is None else {claim.id: kept.read(claim, setup) for claim in claims}
        found = {id: tested for id, tested in read.items() if tested is not None}
        if kept is not None and (why := kept.refusal):
            on_trouble(f"nothing is kept: {cache} ({why})")
            kept = None
        for tested in found.values():
            on_ready(tested)
        missing = [claim for claim in claims if claim.id not in found]
        if missing:
            shared = kept or Cache(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            setup = replace(setup, runs=shared.runs(setup))
        running: dict[str, None] = {}

        def begun(id: str) -> None:
            running[id] = None
            progress(" ".join(list(running)), len(found), len(claims))

        for tested in stack.enter_context(contextlib.closing(_measured(missing, setup, jobs, begun))):
            found[tested.claim.id] = tested
            running.pop(tested.claim.id, None)
            on_ready(tested)
            try:
                if kept is not None:
                    kept.write(tested, setup)
            except OSError as error:
                on_trouble(f"nothing is kept: {cache} ({error.strerror or error})")
                kept = None
            progress(" ".join(list(running)), len(found), len(claims))
        return [found[claim.id] for claim in claims]


def _measured(
    claims: Sequence[Claim], setup: Setup, jobs: int, begun: Callable[[str], None]
) -> Generator[ClaimResult, None, None]:
    """Each claim as it is ready. No process is left at the end, however it comes."""
    jobs = min(jobs, len(claims))
    if not jobs:
        return
    workers = [Worker(setup) for _ in range(jobs)]
    free: Queue[Worker] = Queue()
    for worker in workers:
        free.put(worker)
    # Trained claims wait for one another where they share runs: one worker takes these, the others the rest.
    waiting = deque(sorted(claims, key=lambda claim: not claim.has_long))

    def measure() -> ClaimResult:
        worker = free.get()
        claim = waiting.popleft() if worker is workers[0] else waiting.pop()
        try:
            begun(claim.id)
            return worker.measure(claim)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(measure) for _ in claims]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()
        pool.shutdown()
