"""The state a model is looked at in: eval mode, and nothing fused that hides its ops or its derivatives."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.jit._fuser import optimized_execution
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Eval mode, `torch.backends.mha` fast path off, SDPA under the math backend, compiled code run eagerly.

    Fused attention shows neither its logits nor a second derivative; compiled code shows no modules.
    Everything is as it was on leaving, also on an exception, each submodule's train/eval flag by itself.
    """
    modes = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # A traced graph that the profiling executor rewrites would change its ops between two forwards.
        stack.enter_context(optimized_execution(False))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, mode in modes:
                module.training = mode
