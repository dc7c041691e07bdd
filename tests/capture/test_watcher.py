"""The watcher of a script with several threads, and of a process that was forked from one that is watched."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normscope.capture.folder import Folder, Settings
from normscope.capture.watcher import Watcher
from normscope.recording.calls import Forward
from normscope.recording.roots import ids

PATIENCE = 30.0
MODEL = nn.Linear(2, 2)
SEEN = Forward(MODEL, {}, torch.ones(()), None)


class Watched(Folder):
    """A folder whose check is this process."""

    def is_watched(self) -> bool:
        return True


@pytest.fixture
def watcher(tmp_path: Path) -> Watcher:
    """A watcher between a backward and the step of a second optimizer."""
    watcher = Watcher(Watched(tmp_path), Settings(command="train.py"), lambda: None)
    watcher._forwards, watcher._outputs, watcher._spent = [SEEN], [(torch.ones(2),)], [(torch.ones(2),)]
    return watcher


def shared(watcher: Watcher) -> Any:
    return list(watcher._forwards), list(watcher._outputs), list(watcher._spent), watcher._clip


EVENTS: dict[str, Callable[[Watcher], object]] = {
    "begins": lambda watcher: watcher.begins(MODEL),
    "clears": lambda watcher: watcher.clears(MODEL.parameters()),
    "clips": lambda watcher: watcher.clips(1.0),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_an_event_of_one_thread_waits_for_that_of_another(
    event: Callable[[Watcher], object], watcher: Watcher
) -> None:
    before = shared(watcher)
    with ThreadPoolExecutor(1) as pool:
        with watcher._lock:
            done = pool.submit(event, watcher)
            with pytest.raises(TimeoutError):
                done.result(0.2)
            assert shared(watcher) == before
        done.result(PATIENCE)
    assert shared(watcher) != before


def test_a_forked_process_begins_anew(watcher: Watcher) -> None:
    watcher._root, watcher._own = MODEL, ids(MODEL)
    with watcher.events.paused(), watcher.events.muted(), watcher._lock:
        watcher.forked()
        assert not watcher.events._is_silent
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(watcher._lock.acquire, timeout=PATIENCE).result()
    assert watcher._root is None
    for known in (watcher._own, watcher._forwards, watcher._outputs, watcher._spent):
        assert not known
