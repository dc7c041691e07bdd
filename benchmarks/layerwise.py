"""The table of `layerwise_sigma_min` on stacks of the size of GPT-2-small, in docs/linalg.md.

    python -m benchmarks.layerwise               # prints the table; takes some minutes on one core

Random weights, float32, one sequence. A factor of the stack is the part between the inputs of two branches. κ
is σ_max divided by an upper bound of σ_min; if that has not converged, the true κ is larger.
"""

import os
import time
from datetime import UTC, datetime

import torch

from normscope.anatomy import measuring, read_anatomy
from normscope.linalg import layerwise_sigma_min, sigma_max
from normscope.probes.jacobian.budget import Budget, Spending
from normscope.probes.jacobian.held_graph import hold
from normscope.probes.jacobian.layers import layers_of
from normscope.probes.jacobian.one_sequence import one_sequence
from normscope.probes.jacobian.workspace import Workspace
from normscope.subjects import load

CASES = (("hf:gpt2", 32), ("hf:gpt2", 128), ("hf:bert", 32))
TOLERANCE = 5e-2
MAX_PRODUCTS = {32: 300, 128: 60}


def row(spec: str, tokens: int) -> str:
    """One line of the table."""
    subject = load(spec, batch_size=1, seq_len=tokens)
    anatomy = read_anatomy(subject)
    with measuring(subject.model):
        feed = one_sequence(subject.model, subject.batch, anatomy)
        graph = hold(subject.model, anatomy, feed)
        workspace = Workspace(subject.model, anatomy, feed, graph, "", Spending(Budget.DEEP))
        stack = anatomy.stacks[0]
        layers = layers_of(workspace, stack)
        largest = sigma_max(workspace.ends(stack), tol=TOLERANCE, confidence=0.9)
        before, clock = time.process_time(), time.perf_counter()
        found = layerwise_sigma_min(layers, tol=TOLERANCE, max_products=MAX_PRODUCTS[tokens])
        cpu, wall = time.process_time() - before, time.perf_counter() - clock
    condition = f"{largest.value / found.value:.2g}" if found.value else "–"
    cells = [
        f"`{spec}`, T = {tokens}",
        str(len(layers)),
        f"{found.products:.0f}",
        str(found.status),
        f"{found.value:.3g}",
        f"{found.error:.1g}",
        condition,
        f"{cpu:.0f} ({wall:.0f})",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table, with date and machine."""
    torch.set_num_threads(1)
    print("| stack | factors | products | status | σ_min | error | κ | CPU seconds (by the clock) |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for spec, tokens in CASES:
        print(row(spec, tokens), flush=True)
    version = torch.__version__.split("+")[0]
    print(f"\n{datetime.now(UTC):%Y-%m-%d}, 1 thread, torch {version}, load {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
