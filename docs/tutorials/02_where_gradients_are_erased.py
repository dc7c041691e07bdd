# # Where gradients are erased
#
# At each norm of a Post-LN stack, a part of the gradient is lost. This page measures how large it is. The
# last norm erases about as much as a random gradient would lose; most of the others erase far less.
#
# A LayerNorm has two input directions that leave no trace, 1 and ẑ (previous page). Training sends
# gradients backward, and they travel by the transpose: a gradient g at the output arrives as Jᵀg. The part
# that is erased lies in the *left* kernel {u : Jᵀu = 0}, not in the right one.
#
# For y = γ ⊙ LN(z) + β the left kernel is γ⁻¹ ⊙ span{1, ẑ}. This page follows real gradients through a
# Post-LN stack and measures at each norm the share of their energy that lies in it.

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

from normscope.linalg import left_kernel, left_kernel_share, right_kernel
from normscope.nn import build

torch.manual_seed(0)
torch.set_num_threads(1)
d = 32

# ## Two directions, and the wrong two
#
# Put a gradient along each direction into the backward pass of one norm and see what arrives. With a random
# γ the directions 1 and ẑ pass well. The lost ones are γ⁻¹ ⊙ 1 and γ⁻¹ ⊙ ẑ.

z = torch.randn(d, dtype=torch.float64, requires_grad=True)
gamma = torch.exp(torch.randn(d, dtype=torch.float64) / 2)
y = F.layer_norm(z, (d,), gamma, eps=0.0)
z_hat = F.layer_norm(z.detach(), (d,), eps=0.0)


def arriving(gradient):
    return torch.autograd.grad(y, z, gradient, retain_graph=True)[0]


right = right_kernel(z_hat, centred=True)  # [d, 2]: 1 and ẑ, of length 1
left, _ = left_kernel(z_hat, gamma, centred=True)  # [d, 2]: γ⁻¹ ⊙ the same
print(f"along 1, ẑ               {arriving(right[:, 0]).norm():.2f}, {arriving(right[:, 1]).norm():.2f}")
print(f"in γ⁻¹ ⊙ span{{1, ẑ}}      {arriving(left[:, 0]).norm():.0e}, {arriving(left[:, 1]).norm():.0e}")
assert arriving(right[:, 0]).norm() > 0.1
assert arriving(left[:, 0]).norm() < 1e-12
assert arriving(left[:, 1]).norm() < 1e-12

# ## The share of a random gradient
#
# A gradient without a preferred direction has 2 of its d parts in a space of two dimensions, so it loses
# 2/d of its energy. This is the reference value below.

random = torch.randn(2000, d, dtype=torch.float64)
share = left_kernel_share(random, z_hat.expand_as(random), gamma, centred=True)
print(f"of random gradients      {share:.4f}")
print(f"2/d                      {2 / d:.4f}")
assert abs(share - 2 / d) < 0.01

# ## Real gradients, norm by norm
#
# A Post-LN model of twelve blocks has 24 norms on its stream, one after each branch. We take the gradient
# of its loss at the output of each. Before training γ = 1, so the left kernel is span{1, ẑ} of each token.


def shares(model, ids, labels, ending):
    """The share erased at each norm whose name ends so, from the first to the last."""
    norms = [module for name, module in model.named_modules() if name.endswith(ending)]
    caught = []
    hooks = [
        norm.register_forward_hook(lambda norm, given, out: caught.append((norm, given[0], out)))
        for norm in norms
    ]
    loss = model(ids, labels).loss
    gradients = torch.autograd.grad(loss, [out for _, _, out in caught])
    for hook in hooks:
        hook.remove()
    found = []
    for (norm, entering, _), gradient in zip(caught, gradients, strict=True):
        normalised = F.layer_norm(entering.detach(), (d,), eps=norm.eps)
        found.append(float(left_kernel_share(gradient, normalised, norm.weight, centred=True)))
    return found


depth = 12
ids, labels = torch.randint(256, (2, 4, 64))
post = build("decoder", scheme="post", depth=depth, width=d, heads=2, init="xavier")
by_norm = shares(post, ids, labels, "norms.stream")
relative = [each / (2 / d) for each in by_norm]
middle = sorted(relative[:-1])[len(relative[:-1]) // 2]
print(f"norms                    {len(relative)}")
print(f"the last one             {relative[-1]:.2f} × 2/d")
print(f"median of those below    {middle:.3f} × 2/d")
print(f"all together             {sum(relative):.1f} × 2/d")
assert relative[-1] > 0.5
assert middle < 0.25
assert sum(relative) < len(relative) / 2

# The last norm erases about as much as a random gradient would lose. Most of the others erase far less. All
# together they erase much less than two directions each.
#
# ## Why the norms below erase so little
#
# The gradient that leaves a norm is orthogonal to 1 and to that norm's ẑ. The norm below it erases 1 and
# *its own* ẑ. If a branch adds little to the stream, ẑ hardly turns between the two norms, and the part
# that the lower norm would erase is already gone. Without a branch between them, nothing is left to erase.
# The more a branch adds, the more is erased.

print("branch    share at the lower norm")
found = []
for scale in (0.0, 0.1, 0.3, 1.0, 3.0):
    low = F.layer_norm(torch.randn(2000, d, dtype=torch.float64), (d,), eps=0.0).requires_grad_()
    branch = scale * torch.randn(2000, d, dtype=torch.float64)  # adds this, passes no gradient itself
    high = F.layer_norm(low + branch, (d,), eps=0.0)
    (gradient,) = torch.autograd.grad(high, low, torch.randn_like(high))
    found.append(float(left_kernel_share(gradient, low, None, centred=True)) / (2 / d))
    print(f"{scale:4.1f}      {found[-1]:.3f} × 2/d")
assert found[0] < 1e-12
assert found == sorted(found)
assert found[-1] < 0.55  # of the two directions 1 is always gone already

# ## And Pre-LN?
#
# In Pre-LN a gradient travels down the stream past the norms of all branches. There is still one norm on
# the stream, the one before the head. It takes its share from every gradient.

pre = build("decoder", scheme="pre", depth=depth, width=d, heads=2, init="xavier")
(final,) = shares(pre, ids, labels, "final_norm")
print(f"Pre-LN's final norm      {final / (2 / d):.2f} × 2/d")
print(f"Post-LN's last norm      {relative[-1]:.2f} × 2/d")
assert final / (2 / d) > 0.5

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
axes.semilogy(range(1, len(relative) + 1), relative, "o-", color="#1f5a99", markersize=4, label="Post-LN")
axes.semilogy([len(relative)], [final / (2 / d)], "s", color="#c44e2b", label="Pre-LN, final norm")
axes.axhline(1, color="#999999", linewidth=1, zorder=0)
axes.annotate("2/d, a random gradient", (1, 1.15), color="#777777")
axes.set(
    title="share of the gradient's energy erased at each norm", xlabel="norm, from the embedding to the head"
)
axes.set(ylabel="share / (2/d)", ylim=(0.008, 3))
axes.legend(frameon=False, loc="lower right")
plt.savefig("02_where_gradients_are_erased.png", dpi=110)  # Low shares at all norms of Post-LN but the last

# So every norm really erases its two directions, exactly. But two are few, most of them are the same ones
# again, and Pre-LN loses them as well. The difficulty of training Post-LN needs another explanation. The
# next page tests whether the rank is the reason.
