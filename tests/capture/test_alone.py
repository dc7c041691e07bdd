"""The guard of normscope's own work in one of several processes; the other process is a fake."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from normscope.capture.alone import CommunicationError, alone, num_processes, require_no_sync


@pytest.fixture
def two_processes() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def in_a_backward() -> None:
    weight = torch.ones(2, requires_grad=True)
    doubled = weight * 2
    doubled.register_hook(lambda gradient: dist.all_reduce(gradient))
    doubled.sum().backward()


def in_a_new_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dist.barrier).result()


OPERATORS = torch.ops._c10d_functional


def world() -> str:
    return dist.group.WORLD.group_name


CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "all_gather": lambda: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2)),
    "broadcast": lambda: dist.broadcast(torch.ones(2), 0),
    "barrier": dist.barrier,
    "functional": lambda: functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum(),
    "an overload": lambda: OPERATORS.wait_tensor(OPERATORS.all_reduce.default(torch.ones(2), "sum", world())),
    "by keyword": lambda: OPERATORS.wait_tensor(
        OPERATORS.all_reduce(input=torch.ones(2), reduce_op="sum", group_name=world())
    ),
    "with a gradient": lambda: torch.distributed.nn.functional.all_reduce(torch.ones(2)),
    "in a backward": in_a_backward,
    "in a new thread": in_a_new_thread,
}


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.usefixtures("two_processes")
def test_a_collective_raises_at_once_and_works_later(call: Callable[[], object]) -> None:
    call()
    with alone(), pytest.raises(CommunicationError, match="communicates with other processes"):
        call()
    call()


@pytest.mark.usefixtures("two_processes")
def test_threads_of_the_script_and_groups_of_one_process_go_on() -> None:
    begun, done = threading.Event(), threading.Event()

    def older() -> None:
        begun.wait()
        dist.barrier()
        done.set()

    thread = threading.Thread(target=older)
    thread.start()
    of_one = dist.new_group([0])
    with alone():
        begun.set()
        assert done.wait(30)
        dist.all_reduce(torch.ones(2), group=of_one)
        functional.all_reduce(torch.ones(2), "sum", of_one).sum()
        OPERATORS.wait_tensor(OPERATORS.all_reduce.default(torch.ones(2), "sum", of_one.group_name))
    thread.join()


def test_one_process_is_not_guarded() -> None:
    assert num_processes() == 1
    with alone():
        pass


def test_a_module_that_is_known_to_communicate() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    require_no_sync(model)
    with pytest.raises(CommunicationError, match=r"\(SyncBatchNorm\)"):
        require_no_sync(nn.SyncBatchNorm.convert_sync_batchnorm(model))
