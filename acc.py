import torch, time
from torch.utils._python_dispatch import TorchDispatchMode
class M(TorchDispatchMode):
    def __torch_dispatch__(s, f, t, a=(), k=None):
        node = torch._C._current_autograd_node()
        if f._overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_): print(f, node, [x._use_count() for x in a if isinstance(x, torch.Tensor)], [torch._C._storage_Use_Count(x.untyped_storage()._cdata) for x in a if isinstance(x, torch.Tensor)])
        return f(*a, **(k or {}))
x = torch.randn(4, 4, requires_grad=True)
y = x * 2
z = y.sin() + y.cos() + y.exp()
w = (y.select(0, 0) + y.select(0,1)).sum() + z.sum()
with M(): w.backward()
print('---- layernorm etc')
x = torch.randn(4, 4, requires_grad=True)
w = torch.nn.functional.silu(torch.linalg.vector_norm(x, dim=1)).cumprod(0).sum() + x.std()
with M(): w.backward()
print("--- tied residual: y used twice with same grad")
x = torch.randn(4,4, requires_grad=True); h = x*1
o = (h + h*2).sum()
with M(): o.backward()
