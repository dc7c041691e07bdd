"""The demo's runs: a deep Transformer that does not train, and changes that rescue it."""

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from normscope.demo.settings import CONDITIONS, Settings
from normscope.demo.worker import shelves
from normscope.report.figures.scales import figure
from normscope.train import trains
from normscope.train.criterion import last_loss

WORKERS = 2
_POLL_SECONDS = 0.2  # longest delay of a Ctrl-C
_EARLY = 25  # steps after which tokens have collapsed in runs that fail


@dataclass
class Course:
    """One run so far: its losses, and token diversity by step."""

    losses: list[float] = field(default_factory=list)
    looks: list[tuple[int, float]] = field(default_factory=list)

    def smooth(self, window: int) -> list[tuple[int, float]]:
        """Means of `window` losses, each at its last step."""
        ends = range(window, len(self.losses) + 1, window)
        return [(end, sum(self.losses[end - window : end]) / window) for end in ends]


@dataclass
class Story:
    """The state of the demo so far.

    Attributes:
        courses: the runs, keyed by condition and seed.
        seconds: time since the demo's start.
        interrupted: whether Ctrl-C ended it.
    """

    settings: Settings
    courses: dict[tuple[int, int], Course]
    unigram_entropy: float | None = None
    seconds: float = 0.0
    interrupted: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "Story":
        """A story with no losses yet."""
        cells = [(index, seed) for index in range(len(CONDITIONS)) for seed in settings.seeds]
        return cls(settings, {cell: Course() for cell in cells})

    def of_condition(self, index: int) -> list[Course]:
        """The runs of a condition, by seed."""
        return [self.courses[index, seed] for seed in self.settings.seeds]

    def step(self, index: int) -> int:
        """Number of steps that all runs of a condition have finished."""
        return min(len(course.losses) for course in self.of_condition(index))

    def verdicts(self, index: int) -> list[bool] | None:
        """Whether each run of a condition trains; None before all have ended."""
        if self.unigram_entropy is None or self.step(index) < self.settings.steps:
            return None
        return [trains(course.losses, self.unigram_entropy) for course in self.of_condition(index)]

    def losses(self, index: int) -> list[float]:
        """Mean of the last losses of each run of a condition; nan before the first."""
        return [last_loss(course.losses) for course in self.of_condition(index)]

    def diversities(self, index: int) -> list[float]:
        """Latest token diversity of each run of a condition; nan before the first."""
        return [course.looks[-1][1] if course.looks else math.nan for course in self.of_condition(index)]

    def hear(self, line: dict) -> None:
        """Add the results of one line of a worker."""
        if "unigram_entropy" in line:
            self.unigram_entropy = line["unigram_entropy"]
            return
        course = self.courses[line["condition"], line["seed"]]
        course.losses += line["losses"]
        course.looks.append((len(course.losses), line["diversity"]))


def run(settings: Settings, show: Callable[[Story], None]) -> Story:
    """Train all conditions in `WORKERS` processes of one thread each, and call `show` on new results.

    Ctrl-C ends the processes; the story keeps the results so far.

    Raises:
        RuntimeError: a process failed; the message holds its output.
    """
    story, start = Story.of(settings), time.perf_counter()
    news: queue.Queue[str | None] = queue.Queue()
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(share, settings, news)) for share in _shares(settings)]
        try:
            for line in _lines(news, len(workers)):
                if line:
                    story.hear(json.loads(line))
                story.seconds = time.perf_counter() - start
                if news.empty():
                    show(story)
            for require_success in workers:
                require_success()
        except KeyboardInterrupt:
            story.interrupted = True
    return story


def _lines(news: "queue.Queue[str | None]", running: int) -> Iterator[str]:
    """Yield the lines of `running` processes until all have ended; "" after some time without a line."""
    while running:
        try:
            line = news.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            yield ""
            continue
        if line is None:
            running -= 1
        else:
            yield line


def _shares(settings: Settings) -> list[list[int]]:
    """The conditions that each process trains: the largest stack goes first, to the least busy process."""
    stacks = sorted(shelves(range(len(CONDITIONS)), settings), key=len, reverse=True)
    shares: list[list[int]] = [[] for _ in range(min(WORKERS, len(stacks)))]
    for cells in stacks:
        least = min(shares, key=len)
        least += sorted({index for index, _ in cells})
    return shares


@contextlib.contextmanager
def _worker(
    conditions: Sequence[int], settings: Settings, news: "queue.Queue[str | None]"
) -> Iterator[Callable[[], None]]:
    """Start a process that trains `conditions`, and kill it at the end; its lines go to `news`, then None.

    It has its own session, so that only this process gets Ctrl-C. Yields a function that raises RuntimeError
    if the process failed.
    """
    words = ["normscope.demo.worker", json.dumps(asdict(settings)), ",".join(map(str, conditions))]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    news.put(line)
            news.put(None)

        def require_success() -> None:
            if process.wait() != 0:
                said.seek(0)
                raise RuntimeError(f"a process of the demo failed:\n{said.read()}")

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield require_success
        finally:
            process.kill()
            process.wait()
            reader.join()


def moral(story: Story) -> str:
    """The demo's conclusion, from the figures so far."""
    settings, verdicts = story.settings, [story.verdicts(index) for index in range(len(CONDITIONS))]
    # The last token diversity measured in the early steps of each run.
    early = [
        [value for step, value in c.looks if step <= _EARLY][-1] for c in story.of_condition(0) if c.looks
    ]
    who = f"A Post-LN Transformer of {settings.depth} layers with Xavier weights at AdamW {settings.lr:g}"
    if verdicts[0] is None or not early:
        return f"{who}: not finished yet."
    first = (
        f"{who} trains with {sum(verdicts[0])} of {len(settings.seeds)} seeds: within {_EARLY} steps the "
        f"token diversity of its last hidden state falls to {figure(max(early), 1)} or less."
    )
    return " ".join([first, *_rescues(story, verdicts)])


def _rescues(story: Story, verdicts: Sequence[list[bool] | None]) -> list[str]:
    """A sentence on the changes that let every seed train, and one on those that let none."""
    said = []
    for words, wanted in (("Every seed trains", 1.0), ("No seed trains", 0.0)):
        names = [
            condition.words(story.settings)
            for condition, each in zip(CONDITIONS[1:], verdicts[1:], strict=True)
            if each is not None and sum(each) / len(each) == wanted
        ]
        if names:
            said.append(f"{words} with {', or with '.join(names)}.")
    return said
