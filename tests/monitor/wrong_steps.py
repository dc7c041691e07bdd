"""Steps with a known fault: small models, faults put into known places, and the step as a Monitor sees it."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.monitor.faults import WrongBackward
from normscope.monitor.wrong_value import Replay
from normscope.nn import build
from normscope.subjects.feed import tensors_of
from normscope.subjects.rng import keep_random_state

VOCAB, WIDTH, TOKENS = 32, 16, 6
VALUES = {"NaN": math.nan, "infinity": math.inf, "garbage": 1e30}


@dataclass
class Step:
    """A model, the arguments of its forward, and its loss as a function of the output."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_of: Callable[[Any], Tensor]
    autocast: torch.dtype | None = None
    optimizer: torch.optim.Optimizer | None = None

    def replay(self) -> Replay:
        """The forward and the gradient of the loss by its outputs, as one step of a run gives them."""
        state = keep_random_state()
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            result = self.model(*self.args, **self.kwargs)
        outputs = [t for t in tensors_of(result) if t.is_floating_point()]
        loss = self.loss_of(result)
        live = [t for t in outputs if t.requires_grad]
        found = dict(zip(map(id, live), torch.autograd.grad(loss, live, allow_unused=True), strict=True))
        cotangents = [found.get(id(output)) for output in outputs]
        return Replay(
            self.model,
            self.args,
            self.kwargs,
            state,
            self.autocast,
            cotangents,
            loss.detach(),
            () if self.optimizer is None else (self.optimizer,),
        )


class ByHand(nn.Module):
    """A Pre-LN stack whose attention is written out, with a causal mask of -inf in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(HandBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, seen: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x))


class HandBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.wi, self.wo = HandAttention(), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), seen))
        return x + self.drop(self.wo(self.act(self.wi(self.norm2(x)))))


class HandAttention(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), -math.inf).triu(1))

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(WIDTH) + self.mask
        if seen is not None:
            scores = scores.masked_fill(~seen[:, None, :], -math.inf)
        return self.o(scores.softmax(-1) @ v)


def ids() -> Tensor:
    return torch.randint(VOCAB, (2, TOKENS))


def next_token(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output[0]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def square(output: Any) -> Tensor:
    value = output if isinstance(output, Tensor) else output[0]
    return value.float().square().mean()


def with_embeddings(model: nn.Module, **kwargs: Any) -> Step:
    """A Hugging Face model that is given embeddings, so that its batch can hold a wrong value."""
    return Step(model, (), {"inputs_embeds": torch.randn(2, TOKENS, WIDTH), **kwargs}, square)


def decoder(scheme: str) -> Step:
    options = {"width": WIDTH, "heads": 2, "vocab": VOCAB, "context": 8, "depth": 2}
    return Step(build("decoder", scheme=scheme, **options), (ids(),), {}, partial(next_token, targets=ids()))


def gpt2() -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=2, vocab_size=VOCAB, n_positions=8, attn_implementation="eager"
    )
    given = ids()
    return Step(GPT2LMHeadModel(config), (), {"input_ids": given, "labels": given}, lambda out: out.loss)


def bert() -> Step:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
    )
    return with_embeddings(BertModel(config), attention_mask=torch.tensor([[1] * TOKENS, [1, 1, 1, 0, 0, 0]]))


def llama() -> Step:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
    )
    return with_embeddings(LlamaModel(config))


def torch_encoder() -> Step:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    return Step(model, (torch.randn(2, TOKENS, WIDTH),), {}, square)


ARCHITECTURES: dict[str, Callable[[], Step]] = {
    "pre": partial(decoder, "pre"),
    "post": partial(decoder, "post"),
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "torch": torch_encoder,
    "hand": lambda: Step(ByHand(), (ids(),), {}, partial(next_token, targets=ids())),
}


def step_of(architecture: str) -> Step:
    """A new step in training mode, always the same."""
    torch.manual_seed(7)
    step = ARCHITECTURES[architecture]()
    step.model.train()
    return step


@dataclass(frozen=True)
class Fault:
    """A fault of the grid.

    Attributes:
        architecture, what, where, value: its names in the table.
        put: puts it into a step.
        module, phase: the right answer.
        cause: a part of the cause; "" if the grid does not ask for it.
    """

    architecture: str
    what: str
    where: str
    value: str
    put: Callable[[Step], None] = dataclasses.field(compare=False)
    module: str = ""
    phase: str = ""
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.architecture}-{self.what}-{self.where}-{self.value}"


@cache
def returned(architecture: str) -> dict[str, str]:
    """The modules that return one tensor → the module that made it, which may be one inside or before."""
    step, made, found = step_of(architecture), {}, {}
    kept = []

    def seen(path: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            kept.append(output)
            is_passed_on = any(output is given for given in args)  # a dropout of 0
            found[path] = made.get(id(output), "") if is_passed_on else made.setdefault(id(output), path)

    for path, module in step.model.named_modules():
        if path:
            module.register_forward_hook(partial(seen, path))
    step.model(*step.args, **step.kwargs)
    return found


def sites(architecture: str) -> dict[str, str]:
    """One module of each kind that returns a tensor: the last of its class → the module that made it."""
    model = step_of(architecture).model
    kinds = {type(model.get_submodule(path)): path for path in returned(architecture)}
    return {path: returned(architecture)[path] for path in kinds.values()}


def weights(architecture: str) -> list[str]:
    """One parameter of each kind: the last of its class of module and own name."""
    model = step_of(architecture).model
    kinds = {}
    for name, _ in model.named_parameters():
        path, _, own = name.rpartition(".")
        kinds[type(model.get_submodule(path)), own] = name
    return list(kinds.values())


def linears(architecture: str) -> list[str]:
    """One linear map of each name."""
    model = step_of(architecture).model
    kinds = {
        path.rpartition(".")[2]: path
        for path, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and path in returned(architecture)
    }
    return list(kinds.values())


def norms(architecture: str) -> list[str]:
    """One norm of each class."""
    model = step_of(architecture).model
    return list(
        {
            type(m): path
            for path, m in model.named_modules()
            if hasattr(m, "eps") or hasattr(m, "variance_epsilon")
        }.values()
    )


def set_entry(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[tensor.numel() // 2] = value


def in_data(step: Step, value: float) -> None:
    given = [t for t in tensors_of((step.args, step.kwargs)) if t.is_floating_point()]
    set_entry(given[0], value)


def in_weight(step: Step, name: str, value: float) -> None:
    set_entry(step.model.get_parameter(name), value)


def in_state(step: Step, name: str, key: str, value: float) -> None:
    step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-3)
    step.loss_of(step.model(*step.args, **step.kwargs)).backward()
    step.optimizer.step()
    step.optimizer.zero_grad()
    set_entry(step.optimizer.state[step.model.get_parameter(name)][key], value)


def in_activation(step: Step, path: str, value: float) -> None:
    def write(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, 0] = value
        return output

    step.model.get_submodule(path).register_forward_hook(write)


def in_gradient(step: Step, path: str, value: float) -> None:
    def write(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = value
        return gradient

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(write)

    step.model.get_submodule(path).register_forward_hook(hook)


def overflowing(step: Step, path: str) -> None:
    step.autocast = torch.float16
    step.model.get_submodule(path).register_forward_pre_hook(
        lambda module, args: (torch.full_like(args[0], 3e4), *args[1:])
    )
    with torch.no_grad():
        step.model.get_submodule(path).weight.add_(1.0)


def constant(step: Step, path: str) -> None:
    module = step.model.get_submodule(path)
    setattr(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps", 0.0)

    def flat(module: nn.Module, args: Any) -> Any:
        kept = torch.ones_like(args[0])
        kept[0, 0] = 0.0
        return (args[0] * kept, *args[1:])

    module.register_forward_pre_hook(flat)


def wrong_backward(step: Step, path: str) -> None:
    step.model.get_submodule(path).register_forward_hook(lambda m, args, out: WrongBackward.apply(out))


def masked(step: Step) -> None:
    """Mask the first sequence throughout, where the attention of the architecture lets NaN out."""
    if isinstance(step.model, ByHand):
        step.args = (*step.args, torch.tensor([[False] * TOKENS, [True] * TOKENS]))
    else:
        mask = torch.zeros(2, 1, TOKENS, TOKENS)
        mask[0, 0, 3] = -math.inf
        step.kwargs["attention_mask"] = mask


def grid() -> Iterator[Fault]:
    """All faults."""
    for name in ARCHITECTURES:
        makes = sites(name)
        for kind, value in VALUES.items():
            at = partial(Fault, name, value=kind)
            if any(t.is_floating_point() for t in tensors_of((step_of(name).args, step_of(name).kwargs))):
                yield at("data", "batch", put=partial(in_data, value=value), module="", phase="data")
            for weight in weights(name):
                owner = weight.rpartition(".")[0]
                put = partial(in_weight, name=weight, value=value)
                yield at("weight", weight, put=put, module=owner, phase="parameter")
            learnt = [weight for weight in weights(name) if _learns(name, weight)]
            for index, weight in enumerate(learnt[::3]):
                put = partial(in_state, name=weight, key=("exp_avg", "exp_avg_sq")[index % 2], value=value)
                owner = weight.rpartition(".")[0]
                yield at("state", weight, put=put, module=owner, phase="optimizer state")
            for path, maker in makes.items():
                put = partial(in_activation, path=path, value=value)
                yield at("activation", path, put=put, module=path, phase="forward")
                if maker and _has_gradient(name, path):
                    put = partial(in_gradient, path=path, value=value)
                    yield at("gradient", path, put=put, module=maker, phase="backward")
        for path in linears(name):
            put = partial(overflowing, path=path)
            yield Fault(name, "overflow", path, "float16", put, path, "forward", "overflow of float16")
        for path in norms(name):
            put = partial(constant, path=path)
            yield Fault(name, "variance", path, "eps 0", put, path, "forward", "zero variance")
        for path in makes:
            if _has_gradient(name, path):
                put, cause = partial(wrong_backward, path=path), "WrongBackward"
                yield Fault(name, "wrong backward", path, "NaN", put, path, "backward", cause)
    yield Fault(
        "gpt2", "masked row", "", "NaN", masked, "transformer.h.0.attn", "forward", "fully masked row"
    )
    yield Fault("hand", "masked row", "", "NaN", masked, "blocks.0.attention", "forward", "fully masked row")


@cache
def _learnt(architecture: str) -> set[str]:
    """Parameters that get a gradient."""
    step = step_of(architecture)
    step.loss_of(step.model(*step.args, **step.kwargs)).backward()
    return {name for name, p in step.model.named_parameters() if p.grad is not None}


def _learns(architecture: str, name: str) -> bool:
    return name in _learnt(architecture)


@cache
def _gradients(architecture: str) -> dict[str, bool]:
    """Whether a gradient reaches what a module returns."""
    step, found = step_of(architecture), {}

    def seen(path: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            found[path] = False
            output.register_hook(lambda gradient: found.__setitem__(path, True))

    for path, module in step.model.named_modules():
        module.register_forward_hook(partial(seen, path))
    step.loss_of(step.model(*step.args, **step.kwargs)).backward()
    return found


def _has_gradient(architecture: str, path: str) -> bool:
    return _gradients(architecture).get(path, False)
