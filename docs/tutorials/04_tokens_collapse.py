# # Tokens collapse
#
# In a deep Post-LN stack the differences between tokens get lost. After enough blocks every position holds
# the same vector. Such a model can predict how often each byte occurs, and nothing else. This page measures
# the collapse by depth and by step, and finds the part that causes it.

import matplotlib.pyplot as plt
import torch

from normscope.nn import build
from normscope.train import RunConfig

torch.set_num_threads(1)
torch.set_flush_denormal(True)
d, T = 32, 32


def diversity(x):
    """Share of the energy of x [B, T, d] that is not the mean over its tokens."""
    return float((x - x.mean(1, keepdim=True)).square().sum() / x.square().sum())


# ## By depth, before any training
#
# A random byte sequence goes through 32 blocks with Xavier weights. Diversity is 1 if the tokens have
# nothing in common, and 0 if they are all alike.


@torch.no_grad()
def along(scheme, depth=32, seed=0):
    """The stream before the first block and after each, of a model at its start."""
    torch.manual_seed(seed)
    model = build("decoder", scheme=scheme, init="xavier", depth=depth, width=d, heads=2, context=T)
    streams = []
    model.blocks[0].register_forward_pre_hook(lambda _, given: streams.append(given[0]))
    for block in model.blocks:
        block.register_forward_hook(lambda _, given, out: streams.append(out))
    model(torch.randint(256, (4, T)))
    return streams


post, pre = along("post"), along("pre")
print("blocks    Post-LN   Pre-LN")
for depth in (0, 1, 4, 8, 16, 32):
    print(f"{depth:6}   {diversity(post[depth]):8.3f} {diversity(pre[depth]):8.3f}")
assert diversity(post[32]) < 0.1 * diversity(post[0])
assert diversity(pre[32]) > 5 * diversity(post[32])

# ## Lengths are kept, differences are not
#
# The norm sees one token at a time and brings each to length √d, block after block. So nothing looks wrong
# in a single token. But attention with random weights attends to all positions almost equally: it adds
# nearly the same vector, the mean over tokens, to every token. Then the norm shortens the sum. The common
# part has grown, the token's own part has only been shortened. This repeats in every block.

length = torch.stack([x.norm(dim=-1).mean() for x in post[1:]])
print(
    f"length of a token after each block, in √d: {length.min() / d**0.5:.3f} to {length.max() / d**0.5:.3f}"
)
assert (length / d**0.5 - 1).abs().max() < 0.01

# To check that attention is the cause, put each token in a sequence of its own. There is nothing to average
# then, and the tokens stay different for much longer.


@torch.no_grad()
def one_by_one(depth=32, seed=0):
    """Diversity over 32 sequences of one token each, after the last block."""
    torch.manual_seed(seed)
    model = build("decoder", scheme="post", init="xavier", depth=depth, width=d, heads=2, context=T)
    caught = []
    model.blocks[-1].register_forward_hook(lambda _, given, out: caught.append(out))
    model(torch.randint(256, (4 * T, 1)))
    return diversity(caught[0].view(4, T, d))


alone = one_by_one()
print(f"diversity after 32 blocks: one sequence {diversity(post[32]):.3f}, each token by itself {alone:.3f}")
assert alone > 3 * diversity(post[32])

# ## Queries and keys get no gradient
#
# If all tokens are alike, it does not matter which of them attention attends to: any weights give the same
# average. The loss then does not depend on queries and keys, and their gradient is nearly zero. Only they
# could end the averaging, and they are the part that receives no signal.


def starved(scheme, depth, seed=0):
    """‖∂loss/∂W_q‖ over ‖∂loss/∂W_v‖ in the last block."""
    torch.manual_seed(seed)
    model = build("decoder", scheme=scheme, init="xavier", depth=depth, width=d, heads=2, context=T)
    ids = torch.randint(256, (4, T + 1))
    model(ids[:, :-1], ids[:, 1:]).loss.backward()
    attention = model.blocks[-1].attention
    return float(attention.q.weight.grad.norm() / attention.v.weight.grad.norm())


print("‖∇W_q‖/‖∇W_v‖ of the last block")
ratios = {}
for depth in (2, 8, 32):
    ratios[depth] = [sum(starved(scheme, depth, seed) for seed in range(3)) / 3 for scheme in ("post", "pre")]
    print(f"  {depth:2} blocks   Post-LN {ratios[depth][0]:.1e}   Pre-LN {ratios[depth][1]:.1e}")
assert ratios[32][0] < 0.1 * ratios[2][0]
assert ratios[32][0] < 0.1 * ratios[32][1]

# ## By step
#
# Six blocks do not collapse at the start. Training does the rest: AdamW at 3e-3 without warm-up, on text.
# The first steps are large, and within a few dozen of them the tokens are alike. After that the model does
# not recover, for the reason above.


def train(scheme, steps=100, every=5):
    """Diversity after the last block as training goes on, on a batch of its own."""
    spec = f"nn:decoder,scheme={scheme},init=xavier,depth=6,width={d},heads=2"
    subject = RunConfig(model=spec, seq_len=T, validation=0.0).subject()
    model, batches = subject.model, subject.batches()
    watched, caught, seen = subject.batch["ids"], [], []
    hook = model.blocks[-1].register_forward_hook(lambda _, given, out: caught.append(out.detach()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for step in range(steps + 1):
        if step % every == 0:
            model(watched)
            seen.append(diversity(caught[-1]))
        loss = subject.loss(next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        caught.clear()
    hook.remove()
    return seen


runs = {"Post-LN": train("post"), "Pre-LN": train("pre")}
for name, seen in runs.items():
    last = "under 1e-4" if seen[-1] < 1e-4 else f"{seen[-1]:.1f}"
    print(f"{name:8} at the start {seen[0]:.2f}, after 100 steps {last}")
assert runs["Post-LN"][0] > 0.1
assert runs["Post-LN"][-1] < 1e-4
assert runs["Pre-LN"][-1] > 0.02
assert min(runs["Pre-LN"]) < 0.5 * runs["Pre-LN"][-1]

# ## The picture
#
# Left: by depth at the start. Right: by step, six blocks. Pre-LN dips in its first steps too, and recovers,
# because its averaging branch is added to a stream that still contains the tokens.

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for name, streams, color in (("Post-LN", post, "#c44e2b"), ("Pre-LN", pre, "#1f5a99")):
    left.semilogy([diversity(x) for x in streams], color=color, label=name)
    right.semilogy(range(0, 101, 5), [max(x, 1e-12) for x in runs[name]], color=color, label=name)
left.set(title="at the start, by depth", xlabel="blocks", ylabel="diversity of tokens")
right.set(title="in training, by step", xlabel="step")
left.legend(frameon=False)
plt.savefig("04_tokens_collapse.png", dpi=95)  # Two falling curves for Post-LN, two that stay for Pre-LN

# The lesson: a norm protects the scale of each token, but not the differences between tokens. Norms of
# activations alone do not show this collapse. Diversity shows it, and costs one line of code.
