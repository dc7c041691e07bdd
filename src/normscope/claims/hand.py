"""`Hand`: one worker process of `run_claims`, and another in its place where it dies."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import IO

from normscope.claims.claim import Claim
from normscope.claims.evidence import Evidence
from normscope.claims.look import Look
from normscope.claims.tested import Tested
from normscope.claims.worker import settings_of
from normscope.errors import describe

START = "import sys; from normscope.claims.worker import main; main(sys.argv[1])"


class Hand:
    """A worker process; another takes its place where one dies."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[bytes] | None = None
        self._ended = False
        self._lock = threading.Lock()  # a worker must not start while all are ended

    def test(self, claim: Claim) -> Tested:
        """The claim, tested; a worker that dies of it, or cannot be started, is said in its `error`."""
        began = time.perf_counter()
        try:
            process = self._running()
            answer = self._ask(process, claim)
            if answer.endswith("\n"):
                return replace(Tested.from_cache(claim, json.loads(answer)), cached=False)
            words = f"its process {_ending(process.wait())}: {self._last_words()}"
            self._close()
        except (OSError, ValueError, KeyError, TypeError) as error:
            words = describe(error)
        return Tested(
            claim=claim,
            evidence=Evidence(unmeasured=[words]),
            seconds=time.perf_counter() - began,
            long=self._look.long,
            error=words,
        )

    def end(self) -> None:
        """End the worker, whatever it does; no other is started."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Let go of its pipes, once nobody waits for it."""
        self.end()
        self._close()

    def _ask(self, process: "subprocess.Popen[str]", claim: Claim) -> str:
        """A line, or what there is of one where the worker dies."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{claim.id} {claim.measure.__module__}\n")
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""

    def _running(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._ended:
                raise OSError("ended before it began")
            if self._process is None:
                self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by `_close`
                self._process = subprocess.Popen(
                    [sys.executable, "-c", START, settings_of(self._look)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said,
                    text=True,
                    encoding="utf-8",
                )
            return self._process

    def _close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            said, self._said = self._said, None
        pipes = [said] if process is None else [said, process.stdin, process.stdout]
        for pipe in pipes:
            with contextlib.suppress(OSError):  # what was written to a worker that died
                if pipe is not None:
                    pipe.close()

    def _last_words(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _ending(status: int) -> str:
    """`ended with status 1`, `was killed by SIGKILL`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
