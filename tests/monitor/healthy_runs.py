"""Synthetic healthy runs: what the rows of a run look like that nothing is wrong with."""

from collections.abc import Iterator

import numpy as np

STEPS = 2000
BLOCKS = 12
EVERY = 10
SITES = [f"blocks.{i}" for i in range(BLOCKS)]
HEADS = [f"{site}.head{head}" for site in SITES[::4] for head in range(4)]
STEP_LAYOUT = (
    ("loss", ""),
    ("gradient/norm", ""),
    ("lr", ""),
    ("skipped", ""),
    *(("stream/rms", site) for site in SITES),
    *(("branch/update-ratio", f"{site}.mlp") for site in SITES),
    *(("gradient/block", site) for site in SITES),
)
SITES_LAYOUT = (
    *(("stream/max", site) for site in SITES),
    *(("stream/diversity", site) for site in (*SITES, "decoder.hidden")),
    *(("attention/max-logit", site) for site in SITES),
    *(("attention/entropy", site) for site in SITES),
    *(("attention/head-max-logit", head) for head in HEADS),
    *(("attention/head-entropy", head) for head in HEADS),
    *(("weight/norm", site) for site in SITES),
    *(("gain/rms", site) for site in SITES),
    *(("update/ratio", kind) for kind in ("attention", "feed-forward", "norm")),
    *(("update/lost", kind) for kind in ("attention", "feed-forward", "norm")),
)
ENTROPY = 6.0


def noise(rng: np.random.Generator, count: int, scale: float, tail: float = 0.0) -> np.ndarray:
    """[STEPS, count] noise that remembers a little; Student-t of `tail` degrees of freedom where tail > 0."""
    raw = rng.normal(size=(STEPS, count)) if tail == 0 else rng.standard_t(tail, size=(STEPS, count))
    return scale * (0.9 * raw + 0.436 * np.roll(raw, 1, axis=0))


def healthy_run(seed: int) -> Iterator[tuple[int, tuple[tuple[str, str], ...], np.ndarray]]:
    """Rows of a run of 2,000 steps: (step, layout, values).

    The seeds differ in noise, schedule (cosine, linear, constant, warm restarts), warm-up, tails of the
    gradient noise, growth of the weights, zero-initialised matrices, initial collapse of the diversity and
    skipped steps at the start.
    """
    rng = np.random.default_rng(seed)
    t = np.arange(1, STEPS + 1, dtype=float)
    warmup = [1, 20, 100, 500][seed % 4]
    decay = [0.5 + 0.5 * np.cos(np.pi * t / STEPS), 1 - t / (STEPS + 1), np.ones(STEPS)][seed % 3]
    if seed % 5 == 4:
        decay = 0.02 + 0.49 * (1 + np.cos(np.pi * (t % 500) / 500))
    lr = 1e-3 * np.minimum(1, t / warmup) * decay
    progress = np.cumsum(lr) / 1e-3
    loss = 2.5 + 8 * np.exp(-progress / 25) * 0.55 + 3.6 * (1 + progress / 60) ** -0.5
    loss = loss + noise(rng, 1, 0.03 + 0.05 * rng.random())[:, 0]
    tail = [0.0, 7.0, 5.0][seed % 3]
    early = 1 + 8 * np.exp(-t / 8)
    gradient = early * (1 + progress / 300) ** -0.3 * np.exp(noise(rng, 1, 0.12, tail)[:, 0])
    blocks = gradient[:, None] * rng.uniform(0.1, 0.5, BLOCKS) * np.exp(noise(rng, BLOCKS, 0.08, tail))
    rms = (1 + np.linspace(0, 3, BLOCKS)) * (1 + (progress / 200)[:, None] ** 0.5)
    rms = rms * np.exp(noise(rng, BLOCKS, 0.02))
    ratio = np.linspace(0.5, 0.1, BLOCKS) * (1 + progress / 300)[:, None] ** -0.4
    ratio = ratio * np.exp(noise(rng, BLOCKS, 0.05))
    skipped = np.zeros(STEPS)
    if seed % 4 == 3:
        skipped[: int(rng.integers(1, 12))] = 1
        skipped[[700, 1400]] = 1
        gradient, blocks = gradient.copy(), blocks.copy()
        gradient[skipped == 1], blocks[skipped == 1] = np.inf, np.nan
    largest = rms * 5 * np.exp(np.abs(noise(rng, BLOCKS, 0.15)))
    fall = 1e-4 if seed % 6 == 5 else 1.0
    diversity = (
        0.5 * np.where(t < 15, np.maximum(fall, 10 ** (-t / 3)), np.maximum(fall, 1e-3) ** 0.5)[:, None]
    )
    diversity = diversity * np.exp(noise(rng, BLOCKS + 1, 0.1))
    logits = 2 + 12 * (1 - np.exp(-progress / 400))[:, None] * rng.uniform(0.5, 1.5, BLOCKS)
    logits = logits * np.exp(np.abs(noise(rng, BLOCKS, 0.1)))
    more = np.random.default_rng((seed, 1))  # the other columns keep their values
    entropy = 1 - (0.2 + 0.7 * more.random(BLOCKS)) * (1 - np.exp(-progress / 150))[:, None]
    entropy = np.clip(entropy * np.exp(0.05 * more.normal(size=(STEPS, BLOCKS))), 0, 1)
    sharp = np.exp(-4 * more.random(len(HEADS)) * np.minimum(1, progress / 100)[:, None])
    head_entropy = np.clip(sharp * np.exp(0.1 * more.normal(size=(STEPS, len(HEADS)))), 0, 1)
    head_logits = np.repeat(logits[:, ::4], 4, axis=1) * more.uniform(0.3, 1, len(HEADS))
    start = np.where(rng.random(BLOCKS) < 0.3, 0.0, 10.0)
    weights = np.sqrt(start**2 + (0.05 * progress[:, None] * rng.uniform(0.3, 1, BLOCKS)) ** 2)
    gains = 1 + 0.1 * np.tanh(progress / 500)[:, None] * rng.normal(size=BLOCKS)
    update = lr[:, None] * [0.5, 0.4, 1.0] * np.exp(noise(rng, 3, 0.15))
    lost = np.clip(np.array([0.01, 0.02, 0.1]) + noise(rng, 3, 0.02), 0, 1)
    steps = np.column_stack([loss, gradient, lr, skipped, rms, ratio, blocks])
    sites = np.column_stack(
        [largest, diversity, logits, entropy, head_logits, head_entropy, weights, gains, update, lost]
    )
    for i in range(STEPS):
        yield i + 1, STEP_LAYOUT, steps[i]
        if (i + 1) % EVERY == 0:
            yield i + 1, SITES_LAYOUT, sites[i]
