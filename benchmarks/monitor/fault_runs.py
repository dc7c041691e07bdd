"""Faults in running loops under `normscope.Monitor`, by hand.

    python -m benchmarks.monitor.fault_runs FILE --set held-out --seed 1 --count 240
    python -m benchmarks.monitor.fault_runs FILE --summary

A small model trains. At step 3 to 20 a random fault is put in, and the loop goes on for 30 steps. FILE gets a
line of JSON for each fault; faults that it has are not run again. Two observers run beside the monitor: a
scan of every loss, block output, gradient and weight, and the loss alone.

Judging rule, fixed before the first run:

- The first bad step is the first at which the scan finds NaN, infinity or |x| > 1e18 in the loss, what a
  block returns, a gradient or a weight. A fault without such a step has no effect, and is counted apart.
- It is found in time if the first event "first-wrong-value", or the first alarm NS801 or NS802, is of the
  first bad step or before.
- It is right if the event has the module and the phase of the fault. Of several ranks' events of a step, one
  that names a module counts, as `normscope watch` shows it.
"""

import argparse
import contextlib
import json
import logging
import math
import random
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.monitor.fault_models import HELD_OUT, SEEN, Task
from benchmarks.monitor.faults import Fault, Switch, draw, first_of, wrong_names
from benchmarks.process import records_of
from normscope.monitor import Monitor, RunReader
from normscope.monitor.row import FIRST_WRONG_VALUE

AFTER = 30
"""Steps after the fault."""
LOOPS = {
    "plain": 4,
    "clipped": 2,
    "accumulation": 3,
    "two forwards": 2,
    "bfloat16": 2,
    "float16": 4,
    "checkpoint": 3,
}
"""Loops of one process without a compiler, with their weights in the draw."""
OTHERS = ("compiled", "compiled-inductor", "two ranks", "clipped unseen")
"""Loops that `--loop` names; the last clips and does not call `see_gradients`."""
SETS = {"seen": SEEN, "held-out": HELD_OUT}


class Observers:
    """The scan of every step from that of the fault on, and the loss alone."""

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer, *, has_hooks: bool) -> None:
        self.first: dict[str, int] = {}
        self.is_on, self.step, self.scale = False, 0, 1.0
        self._task, self._optimizer = task, optimizer
        for path, module in task.model.named_modules() if has_hooks else ():
            if re.fullmatch(task.stream, path):
                module.register_forward_hook(self._stream)

    def note(self, what: str, is_wrong: bool) -> None:
        """Note the first step at which something is wrong."""
        if is_wrong:
            self.first.setdefault(what, self.step)

    def _stream(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_of(output)
        if self.is_on and tensor is not None and not torch.compiler.is_compiling():
            self.note("stream", bool(wrong_names(iter([("", tensor)]))))

    def gradients(self) -> None:
        """After the backward."""
        if self.is_on:
            named = ((n, p.grad) for n, p in self._task.model.named_parameters() if p.grad is not None)
            self.note("gradient", bool(wrong_names(named, 1e18 * self.scale)))

    def end(self, loss: float) -> None:
        """After the update."""
        if self.is_on:
            self.note("loss", not abs(loss) <= 1e18)
            self.note("loss alone", not math.isfinite(loss))
            self.note("weight", bool(wrong_names(self._task.model.named_parameters())))
            states = ((k, v) for s in self._optimizer.state.values() for k, v in s.items())
            self.note("state", bool(wrong_names((k, v) for k, v in states if isinstance(v, Tensor))))

    @property
    def first_bad(self) -> int | None:
        """The first bad step."""
        return min(
            (self.first[w] for w in ("loss", "stream", "gradient", "weight") if w in self.first), default=None
        )


def case(which: str, seed: int, number: int, loop: str | None, store: Path) -> dict[str, Any]:
    """Run one fault; the record of it on this rank."""
    chance = random.Random(f"{which}/{seed}/{number}/{loop or ''}")
    names = list(SETS[which])
    name = names[number % len(names)]
    drawn = chance.choices(list(LOOPS), list(LOOPS.values()))[0]
    loop = loop or drawn
    at = chance.randint(3, 20)
    torch.manual_seed(chance.randrange(2**31))
    task = SETS[which][name]()
    task.model.train()
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    switch = Switch()
    fault = draw(chance, task, optimizer, switch, loop)
    part = chance.randrange(2) if loop in ("accumulation", "two forwards") else 0
    begin = time.perf_counter()
    run = _Run(task, optimizer, switch, fault, loop, at, part)
    with Monitor(run.called, optimizer, store=store, on_alarm=lambda _: None) as monitor:
        run.go(monitor)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "set": which,
        "seed": seed,
        "number": number,
        "architecture": name,
        "loop": loop,
        "what": fault.what,
        "where": fault.where,
        "value": fault.value,
        "part": part,
        "step": at,
        "modules": fault.modules,
        "phase": fault.phase,
        "rank": rank,
        "first": run.observers.first,
        "first_bad": run.observers.first_bad,
        "alarm": min((a.step for a in monitor.alarms if a.finding.code in ("NS801", "NS802")), default=None),
        "steps": run.steps,
        "failure": monitor.failure,
        "notes": monitor.notes,
        "seconds": round(time.perf_counter() - begin, 2),
    }


class _Run:
    """A loop with a fault."""

    def __init__(
        self,
        task: Task,
        optimizer: torch.optim.Optimizer,
        switch: Switch,
        fault: Fault,
        loop: str,
        at: int,
        part: int,
    ) -> None:
        self.task, self.optimizer, self.switch, self.fault = task, optimizer, switch, fault
        self.loop, self.at, self.part, self.steps = loop, at, part, 0
        self.is_compiled = loop.startswith("compiled")
        self.has_parts = loop in ("accumulation", "two forwards")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if loop == "float16" else None
        self.autocast = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(loop)
        self.observers = Observers(task, optimizer, has_hooks=not self.is_compiled)
        self.observers.scale = 256.0 if self.scaler else 1.0
        self.is_faulty = not dist.is_initialized() or dist.get_rank() == 1
        self._poisoned: Any = None
        if loop == "checkpoint":
            _checkpoint(task)
        if self.has_parts:
            task.model.register_forward_pre_hook(self._turn, with_kwargs=True)
        self.called: Any = task.model
        if self.is_compiled:
            torch._dynamo.reset()
            backend = "inductor" if loop.endswith("inductor") else "aot_eager"
            self.called = torch.compile(task.model, backend=backend)
        elif loop == "two ranks":
            self.called = nn.parallel.DistributedDataParallel(task.model)

    def go(self, monitor: Monitor) -> None:
        """All steps."""
        for step in range(1, self.at + AFTER + 1):
            self.steps = self.observers.step = step
            is_at = step == self.at and self.is_faulty
            self.observers.is_on = step >= self.at
            if is_at:
                self.fault.begin()
            if step in (self.at, self.at + 1) and self.is_compiled:
                torch._dynamo.reset()  # the code is compiled again, with the fault and without it
            loss = self._step(monitor, step, is_at)
            self.switch.on = False
            if is_at:
                self.fault.end()
            if self._is_over(step, not math.isfinite(loss), bool(monitor.alarms)):
                return

    def _is_over(self, step: int, is_wrong: bool, is_found: bool) -> bool:
        is_over = step >= self.at and is_wrong and (is_found or step >= self.at + 9)
        if dist.is_initialized():
            flag = torch.tensor(float(is_over))
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            is_over = bool(flag)
        return is_over

    def _step(self, monitor: Monitor, step: int, is_at: bool) -> float:
        batches = [_copy(self.task.batches[(step + i) % len(self.task.batches)]) for i in range(2)]
        if is_at:
            batches[self.part] = self.fault.batch(batches[self.part])
            if self.has_parts:
                self._poisoned = next(_tensors(batches[self.part]))
            else:
                self.switch.on = True
        if not self.has_parts:
            loss = self._loss(batches[0])
            self._backward(loss)
        elif self.loop == "two forwards":
            loss = (self._loss(batches[0]) + self._loss(batches[1])) / 2
            self._backward(loss)
        else:
            losses = []
            for batch in batches:
                losses.append(self._loss(batch) / 2)
                self._backward(losses[-1])
            loss = torch.stack([each.detach() for each in losses]).sum()
        self.observers.gradients()
        self._update(monitor)
        self.optimizer.zero_grad()
        monitor.step(loss)
        self.observers.end(float(loss.detach()))
        self._poisoned = None
        return float(loss.detach())

    def _turn(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Turn the fault on for its batch, also where the monitor runs the forward again."""
        first = next(_tensors((args, kwargs)))
        self.switch.on = self._poisoned is not None and first.data_ptr() == self._poisoned.data_ptr()

    def _loss(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            return self.task.loss(self.called, batch)

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _update(self, monitor: Monitor) -> None:
        if self.loop == "clipped":
            monitor.see_gradients()
        if self.loop.startswith("clipped"):
            torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), 1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def _checkpoint(task: Task) -> None:
    """Checkpoint the blocks."""
    for path, module in task.model.named_modules():
        if re.fullmatch(task.stream, path):
            module.forward = _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call


def _tensors(value: Any) -> Iterator[Tensor]:
    return (t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor))


def _copy(batch: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, batch)


def judged(records: list[dict[str, Any]], store: Path) -> dict[str, Any]:
    """One record out of those of all ranks, with the monitor's answer and whether it is right."""
    with RunReader(store) as reader:
        events = [event for event in reader.events() if event.kind == FIRST_WRONG_VALUE]
    record = records[-1]
    first_bad = min((r["first_bad"] for r in records if r["first_bad"] is not None), default=None)
    event = min(events, key=lambda e: (e.step, "module" not in e.data), default=None)
    step = None if event is None else event.step
    alarm = min((r["alarm"] for r in records if r["alarm"] is not None), default=None)
    found = min((s for s in (step, alarm) if s is not None), default=None)
    data = {} if event is None else dict(event.data)
    is_right = data.get("module") in record["modules"] and data.get("phase") == record["phase"]
    return record | {
        "first_bad": first_bad,
        "first": {
            what: min(r["first"][what] for r in records if what in r["first"])
            for what in {key for r in records for key in r["first"]}
        },
        "loss_alone": records[0]["first"].get("loss alone"),
        "alarm": alarm,
        "event": step,
        "found": found,
        "answer": {
            key: data.get(key) for key in ("module", "phase", "kind", "cause", "op", "tensor", "seen")
        },
        "sentence": data.get("sentence"),
        "is_right": is_right,
        "failure": next((r["failure"] for r in records if r["failure"]), None),
    }


def run(file: Path, which: str, seed: int, count: int, loop: str | None) -> None:
    """Run the faults that the file lacks, in this process."""
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        for number in _left(file, which, seed, count, loop):
            store = Path(folder) / f"{number}.db"
            record = judged([case(which, seed, number, loop, store)], store)
            _write(file, record)
            for path in Path(folder).iterdir():
                path.unlink()


def run_on_two_ranks(file: Path, which: str, seed: int, count: int) -> None:
    """Run the faults that the file lacks on rank 1 of two processes."""
    left = _left(file, which, seed, count, "two ranks")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined]
            _rank, (folder, file, which, seed, left), nprocs=2
        )


def _rank(rank: int, folder: str, file: Path, which: str, seed: int, left: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    with _quiet():
        for number in left:
            store = Path(folder) / f"{number}.db"
            record = case(which, seed, number, "two ranks", store)
            records: list[Any] = [None, None]
            dist.all_gather_object(records, record)
            if rank == 0:
                _write(file, judged(records, store))
            dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.getLogger("normscope").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _left(file: Path, which: str, seed: int, count: int, loop: str | None) -> list[int]:
    known = {
        r["number"] for r in records_of(file) if (r["set"], r["seed"], r["given_loop"]) == (which, seed, loop)
    }
    return [number for number in range(count) if number not in known]


def _write(file: Path, record: dict[str, Any]) -> None:
    given = record["loop"] if record["loop"] in OTHERS else None
    with file.open("a") as out:
        out.write(json.dumps(record | {"given_loop": given}) + "\n")
    late = (
        None
        if record["found"] is None or record["first_bad"] is None
        else record["found"] - record["first_bad"]
    )
    print(
        f"{record['number']:4d} {record['architecture']:15} {record['loop']:12} {record['what']:10} "
        f"{record['value']:8} {record['where']:40.40} bad {record['first_bad']} late {late} "
        f"{'right' if record['is_right'] else record['answer']} {record['seconds']} s",
        flush=True,
    )


def shown(record: dict[str, Any]) -> int | None:
    """The first step whose loss, block outputs or gradients are wrong; None if there is none."""
    return min(
        (record["first"][w] for w in ("loss", "stream", "gradient") if w in record["first"]), default=None
    )


def is_in_time(record: dict[str, Any], step: int | None) -> bool:
    """Whether it was found at `step` or before."""
    return step is not None and record["found"] is not None and record["found"] <= step


def summary(records: list[dict[str, Any]]) -> Iterator[str]:
    """The figures of the records, a line for each kind of loop, of fault and of architecture."""
    groups: dict[str, list[dict[str, Any]]] = {"all": records}
    for key in ("loop", "what", "architecture"):
        for value in sorted({r[key] for r in records}):
            groups[f"{key} {value}"] = [r for r in records if r[key] == value]
    for name, chosen in groups.items():
        bad = [r for r in chosen if r["first_bad"] is not None]
        known = [r for r in bad if shown(r) is not None]
        late = Counter("never" if r["found"] is None else r["found"] - r["first_bad"] for r in bad)
        loss = [r["loss_alone"] - r["first_bad"] for r in bad if r["loss_alone"] is not None]
        later = sorted(each for each in loss if each > 0)
        quiet = [r for r in chosen if r["first_bad"] is None]
        steps = {k: n for k, n in sorted(late.items(), key=str) if k not in ("never", 0)}
        parts = (
            f"{name}: {len(chosen)} faults, {len(bad)} with effect",
            f"module and phase right in {sum(r['is_right'] for r in bad)}",
            f"found at the first bad step {sum(is_in_time(r, r['first_bad']) for r in bad)}",
            "at the first step whose loss, streams or gradients show it "
            f"{sum(is_in_time(r, shown(r)) for r in known)} of {len(known)}",
            f"steps later {steps}, never {late['never']}",
            f"without effect {len(quiet)}, found {sum(r['found'] is not None for r in quiet)} of them",
            f"the loss alone: at once {len(loss) - len(later)}, later {len(later)}, "
            f"never {len(bad) - len(loss)}",
            f"median {later[len(later) // 2]} and most {later[-1]} steps later" if later else "",
            f"before the fault {sum(r['found'] is not None and r['found'] < r['step'] for r in chosen)}",
            f"monitor failed {sum(bool(r['failure']) for r in chosen)}",
        )
        yield "; ".join(filter(None, parts))


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", choices=SETS, default="held-out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--loop", choices=[*LOOPS, *OTHERS])
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    if options.summary:
        print("\n".join(summary(records_of(options.file))))
    elif options.loop == "two ranks":
        run_on_two_ranks(options.file, options.set, options.seed, options.count)
    else:
        run(options.file, options.set, options.seed, options.count, options.loop)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
