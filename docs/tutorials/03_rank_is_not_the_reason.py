# # Rank is not the reason
#
# A Post-LN stack ends in a norm, so its Jacobian loses two directions for each token, at any depth. This
# seems to explain why deep Post-LN is hard to train and Pre-LN, whose stream bypasses the norms, is not.
# The experiment below contradicts it: models that lose the *same* rank do not train alike.

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

from normscope.linalg import left_kernel
from normscope.train import RunConfig, last_loss, trains

torch.set_num_threads(1)
torch.set_flush_denormal(True)
d, steps = 32, 300

# ## Four models
#
# All are decoders on bytes of text. The first is Pre-LN in its usual form, with a norm before the head. The
# other three are the same Post-LN stack: with Xavier weights, with smaller weights at the start, and with a
# warm-up of the learning rate.

pre = f"nn:decoder,scheme=pre,init=xavier,depth=6,width={d},heads=2"
post = f"nn:decoder,scheme=post,init=xavier,depth=6,width={d},heads=2"
small = f"nn:decoder,scheme=post,init=normal,depth=6,width={d},heads=2"
MODELS = {  # name: (model, steps of warm-up)
    "Pre-LN, final norm": (pre, 0),
    "Post-LN": (post, 0),
    "Post-LN, weights N(0, 0.02²)": (small, 0),
    "Post-LN, warm-up": (post, 200),
}


def fresh(spec):
    """The model at its start, with batches and loss."""
    return RunConfig(model=spec, seq_len=32, validation=0.0).subject()


# ## They lose the same rank
#
# From the first block's input to the head, Pre-LN has one norm that nothing bypasses: the final one. That
# is enough. Whatever comes before it, Jᵀu = 0 for u in the left kernel of that norm, two dimensions a
# token. We send these directions back through each model, and as many random ones for comparison.


def share_that_gets_through(subject):
    """‖Jᵀu‖ for u in the left kernel of the last norm, beside that of random u of the same size."""
    model, ids = subject.model.double(), subject.batch["ids"][:1]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    last = norms[-1]
    caught = {}
    hooks = [
        model.blocks[0].register_forward_pre_hook(lambda _, given: caught.update(entry=given[0])),
        last.register_forward_hook(lambda _, given, out: caught.update(z=given[0], out=out)),
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    z_hat = F.layer_norm(caught["z"].detach(), (d,), eps=last.eps)
    basis, _ = left_kernel(z_hat, last.weight, centred=True)  # [1, T, d, 2]
    through = []
    for u in (basis[..., 0], basis[..., 1], torch.randn_like(z_hat) / d**0.5):
        (back,) = torch.autograd.grad(caught["out"], caught["entry"], u, retain_graph=True)
        through.append(float(back.norm()))
    model.float()
    return max(through[:2]) / through[2]


torch.manual_seed(0)
print("gets through of the last norm's two directions, beside random ones")
for name, (spec, _) in list(MODELS.items())[:3]:
    share = share_that_gets_through(fresh(spec))
    print(f"  {name:30} {share:.0e}")
    assert share < 1e-3

# The two directions are gone in all of them; the remainder is due to ε. None of the models has full rank.
#
# ## They do not train alike
#
# We train 300 steps of AdamW at a learning rate of 3e-3. A model that learns only how often each byte
# occurs ends at the entropy of those frequencies. A model "trains" if it gets at least 0.1 nats below that.


def train(spec, warmup):
    """The loss of each step, and what was trained."""
    subject = fresh(spec)
    batches = subject.batches()
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=3e-3, fused=True)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / max(1, warmup))
        loss = subject.loss(next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, subject


runs, after = {}, {}
for name, (spec, warmup) in MODELS.items():
    runs[name], after[name] = train(spec, warmup)
    entropy = after[name].unigram_entropy
    verdict = "trains" if trains(runs[name], entropy) else "plateau"
    print(f"{name:30} {last_loss(runs[name]):.2f} nats  {verdict}")
print(f"{'entropy of the bytes':30} {entropy:.2f} nats")
trained = {name: trains(losses, entropy) for name, losses in runs.items()}
assert trained == {name: name != "Post-LN" for name in MODELS}

# The rank is the same, the outcome is not. The two changes that rescue Post-LN do not touch the rank: the
# norms are in the same places, and the kernel is as large as before. Smaller weights and a slow start
# change something else. So the lost rank does not cause the failure by itself, because Pre-LN and two
# Post-LN models train with it. And the rescues do not change it.
#
# ## What does differ
#
# Two other candidates are easy to measure. The first is gain: how much longer or shorter a random gradient
# becomes on its way down the stack. The second is diversity: the share of the stream's energy after the
# last block that differs from token to token. If all tokens are alike, a model can learn nothing but
# frequencies.


@torch.no_grad()
def diversity(subject):
    """Share of the last state's energy that is not the mean over tokens."""
    caught = []
    hook = subject.model.blocks[-1].register_forward_hook(lambda _, given, out: caught.append(out))
    subject.forward()
    hook.remove()
    state = caught[0]
    return float((state - state.mean(1, keepdim=True)).square().sum() / state.square().sum())


def gain(subject):
    """Length of a random gradient at the first block's input over that at the last one's output."""
    caught = []
    blocks = subject.model.blocks
    hooks = [
        blocks[0].register_forward_pre_hook(lambda _, given: caught.append(given[0])),
        blocks[-1].register_forward_hook(lambda _, given, out: caught.append(out)),
    ]
    subject.forward()
    for hook in hooks:
        hook.remove()
    gradient = torch.randn_like(caught[1])
    (arrived,) = torch.autograd.grad(caught[1], caught[0], gradient)
    return float(arrived.norm() / gradient.norm())


torch.manual_seed(0)
gains, before, ends = {}, {}, {}
print(f"{'':30} gain at start   diversity at start   after training")
for name, (spec, _) in MODELS.items():
    start = fresh(spec)
    gains[name], before[name], ends[name] = gain(start), diversity(start), diversity(after[name])
    print(f"{name:30} {gains[name]:10.1f} {before[name]:18.2f} {ends[name]:18.0e}")
assert min(gains.values()) > 1
assert before["Post-LN"] > 0.1
assert ends["Post-LN"] < 1e-3
assert all(ends[name] > 0.05 for name in MODELS if name != "Post-LN")

# No gradient vanishes at the start: the gain is above 1 in all four models. Nor are the tokens alike yet;
# the first steps make them so. In the failed run, the last states of all tokens have become the same. In
# the other three they have not. The model with warm-up began at the same weights as the failed one.

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
for (name, losses), color in zip(runs.items(), ("#c44e2b", "#1f5a99", "#5b9bd5", "#2f8f6b"), strict=True):
    smooth = F.avg_pool1d(torch.tensor(losses)[None], 10, stride=5)[0]
    axes.plot(range(5, 5 * len(smooth) + 1, 5), smooth, color=color, label=name)
axes.axhline(entropy, color="#999999", linewidth=1, linestyle=":")
axes.annotate("frequencies", (0, entropy - 0.12), color="#777777")
axes.set(title="the same rank lost, four runs", xlabel="step", ylabel="loss, nats", ylim=(2.2, 4.2))
axes.legend(frameon=False)
plt.savefig(
    "03_rank_is_not_the_reason.png", dpi=90
)  # Three falling curves, and one that stays at the entropy

# All runs first come down to the dotted line, because frequencies are learnt before anything else. The
# question is what comes after, and whether the tokens still differ enough to learn from. The next page
# shows how tokens collapse. The page after it shows how a slow start prevents that.
