"""A training script that does the odd things in its first argument, for as many steps as the second says."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time

odd, count = sys.argv[1].split(","), int(sys.argv[2]) if len(sys.argv) > 2 else 500


def before_torch():
    if "ignores" in odd:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "terminates" in odd:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    if "lingers" in odd:
        atexit.register(time.sleep, 3)
    if "clears" in odd:
        os.environ.clear()
        os.chdir("/")
    if "excepthook" in odd:
        sys.excepthook = lambda kind, error, trace: print("my own hook:", error)
    if "stdin" in odd:
        print("read", input())
    if "child" in odd:
        sys.exit(subprocess.run([sys.executable, __file__, "plain", *sys.argv[2:]]).returncode + 7)
    if "daemon" in odd and os.fork():
        os._exit(0)
    if "daemon" in odd:
        os.setsid()
        if os.fork():
            os._exit(0)
    if "forks-first" in odd and os.fork():
        os.wait()
        raise SystemExit("the parent must not go on")
    if "sleeps" in odd:
        print("asleep", flush=True)
        time.sleep(100)
    if "early" in odd:
        raise ValueError("no data\nfound")


before_torch()
import torch  # noqa: E402
from torch import nn  # noqa: E402

if "forks" in odd and os.fork() == 0:
    time.sleep(100)
if "forks-then-trains" in odd and os.fork():
    os.wait()
    raise SystemExit("the parent must not go on")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        for parameter in self.encoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

        if "copies" in odd:
            self.encoder.layers[1].load_state_dict(self.encoder.layers[0].state_dict())

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return (torch.arange(8) + index) % 32


def batches():
    if "workers" not in odd:
        return (torch.stack([Data()[8 * i + j] for j in range(8)]) for i in range(10**6))
    return torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2, persistent_workers=True)


def train():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, ids in enumerate(batches()):
        if step == count:
            return
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "slow" in odd:
            time.sleep(0.2)
        if "stops" in odd and step == 6:
            time.sleep(100)
        if "prints" in odd:
            print("x" * 10**6)


def by_hand():
    model = Model()
    for ids in batches():
        model.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)


def catches():
    for _ in range(5):
        try:
            train()
        except BaseException:
            print("caught")
        time.sleep(0.1)


torch.set_num_threads(1)
if "bug" in odd:
    import normscope.capture.watcher

    def broken(*arguments):
        raise KeyError("a bug")

    normscope.capture.watcher.recorded_forward = broken
if "never" in odd:
    print(Model()(next(iter(batches()))).shape)
elif "toy" in odd:
    weight = torch.randn(4, requires_grad=True)
    toy = torch.optim.SGD([weight], lr=0.1)
    for _ in range(count):
        toy.zero_grad()
        weight.square().sum().backward()
        toy.step()
elif "by-hand" in odd:
    by_hand()
elif "catches" in odd:
    catches()
elif "thread" in odd:
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
else:
    train()
if "os-exit" in odd:
    os._exit(5)
if "exits" in odd:
    sys.exit(3)
if "raises" in odd or "excepthook" in odd:
    raise RuntimeError("the disk\nis full")
