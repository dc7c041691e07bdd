"""Gates instead of the add: Highway and GTrXL's GRU.

Shapes: B batch, T tokens, D width.
"""

import torch
from torch import Tensor, nn

from normscope.nn.joins import Built, Norm, Update
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Initialisation, Scheme


class HighwayGate(nn.Module):
    """N(t⊙F(x) + (1−t)⊙x), t = σ(W x + b), with PyTorch's initial W and b from −2 (the paper: −1, −3)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        nn.init.constant_(self.transform.bias, -2.0)

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        t_BTD = torch.sigmoid(self.transform(x_BTD))
        # Not lerp: under autocast only the branch is in half precision.
        return norm((1 - t_BTD) * x_BTD + t_BTD * update(x_BTD))


class GRUGate(nn.Module):
    """N((1−z)⊙x + z⊙h), a GRU whose state is the stream and whose input is y = ReLU(F(x)).

    r = σ(W_r y + U_r x), z = σ(W_z y + U_z x − b), h = tanh(W_h y + U_h (r⊙x)). `of_update` holds W_r, W_z,
    W_h; `of_stream` U_r and U_z; `of_reset` U_h. b starts at 2, so that the stream passes.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_update = nn.Linear(width, 3 * width, bias=False)
        self.of_stream = nn.Linear(width, 2 * width, bias=False)
        self.of_reset = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        y_BTD = torch.relu(update(x_BTD))
        r_y, z_y, h_y = self.of_update(y_BTD).chunk(3, dim=-1)
        r_x, z_x = self.of_stream(x_BTD).chunk(2, dim=-1)
        r_BTD = torch.sigmoid(r_y + r_x)
        z_BTD = torch.sigmoid(z_y + z_x - self.bias)
        h_BTD = torch.tanh(h_y + self.of_reset(r_BTD * x_BTD))
        return norm((1 - z_BTD) * x_BTD + z_BTD * h_BTD)


HIGHWAY = Scheme(
    "highway",
    "t⊙F(x) + (1−t)⊙x, t = σ(Wx + b), b = −2 at the start",
    norms_at(),
    "Srivastava et al. 2015, arXiv:1505.00387",
    join=Built("gate", lambda site: HighwayGate(site.width)),
    initialisation=Initialisation("xavier"),
)
GTRXL = Scheme(
    "gtrxl",
    "(1−z)⊙x + z⊙h, the GRU of state x and input ReLU(F(N(x))), bias 2 on its gate",
    norms_at(Slot.BRANCH_IN),
    "Parisotto et al. 2019, arXiv:1910.06764",
    join=Built("gate", lambda site: GRUGate(site.width)),
    initialisation=Initialisation("xavier"),
)
