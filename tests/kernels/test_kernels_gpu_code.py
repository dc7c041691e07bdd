"""Our Triton kernels compile for GPUs; none is needed for that. Whether they run there is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_laws import needs_triton

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from normscope.kernels import triton_backward, triton_forward

def build(kernel, target, types, constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    return triton.compile(ASTSource(kernel, signature, values), target=target).asm

types = {"num_rows": "i32", "width": "i32", "size": "i64", "seed_ptr": "*i64", "keep_ptr": "*i1"}
types |= {name: "fp32" for name in ("eps", "alpha", "drop", "kept_scale")}
halves = ["x", "branch", "bias", "normed", "stream", "grad_normed", "grad_stream", "grad_x", "grad_branch"]
types |= {f"{name}_ptr": "*bf16" for name in halves}
types |= {f"{name}_ptr": "*fp32" for name in ("s", "weight", "weight_parts", "bias_parts")}
target = GPUTarget("cuda", 90, 32)
tile = {"ROWS": 4, "BLOCK": 1024}
pre = tile | {"IS_LAYER": True, "PRENORM": True}
post = tile | {"IS_LAYER": False, "PRENORM": False, "seed_ptr": None, "weight_ptr": None, "bias_ptr": None}
made = [
    build(triton_forward.forward_kernel, target, types, pre),
    build(triton_forward.forward_kernel, target, types, post | {"stream_ptr": None}),
    build(triton_backward.backward_kernel, target, types, pre | {"x_ptr": None, "branch_ptr": None}),
    build(triton_backward.backward_kernel, target, types, post | {"s_ptr": None, "bias_parts_ptr": None}),
    build(triton_forward.mask_kernel, target, types, {"BLOCK": 4096}),
]
print(json.dumps([sorted(asm) for asm in made]))
"""


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert all("ptx" in stages for stages in json.loads(done.stdout.splitlines()[-1]))
