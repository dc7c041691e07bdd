"""State of a model for measurements: eval mode, without fused code that hides ops or derivatives."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.jit._fuser import optimized_execution
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Eval mode, `torch.backends.mha` fast path off, SDPA under the math backend, compiled code run eagerly.

    Fused attention has no logits and no second derivative; compiled code shows no modules. All state is
    restored on leaving, also after an exception, with each submodule's own train/eval flag.
    """
    modes = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # The profiling executor would rewrite a traced graph, and so change its ops, between two forwards.
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
