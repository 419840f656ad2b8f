"""The gradient reducer in a plain training loop, without a Trainer; checked against one process with all the data.

python examples/reducer_only.py    or    torchrun --standalone --nproc-per-node=2 examples/reducer_only.py
"""

import os
import socket

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp import GradientReducer

STEPS = 5
SIZES = [5, 3, 7, 0]  # samples in a step's micro-batches: two of rank 0, two of rank 1, of which one is empty


def data_of(step: int) -> Tensor:
    """What all ranks see in this step together."""
    return torch.randn(sum(SIZES), 4, dtype=torch.double, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The mean over samples; NaN for none, which does no harm as it counts nothing."""
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(rank: int) -> None:
    """What each process runs."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, single = nn.Linear(4, 1, dtype=torch.double), nn.Linear(4, 1, dtype=torch.double)
    single.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD([*model.parameters(), *single.parameters()], lr=0.1, momentum=0.9)
    reducer = GradientReducer(model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        first, last = data_of(step).split(SIZES)[2 * rank : 2 * rank + 2]
        with reducer.no_sync():  # accumulates and sends nothing
            reducer.backward(loss_of(model, first), count=len(first))
        reducer.backward(loss_of(model, last), count=len(last))
        loss_of(single, data_of(step)).backward()  # for the check: as one process would do it
        if reducer.last.verdict.step:  # no rank had NaN or Inf
            optimizer.step()
    difference = max((p - q).abs().max().item() for p, q in zip(model.parameters(), single.parameters(), strict=True))
    assert difference < 1e-12, difference
    if rank == 0:
        print(f"largest difference to one process after {STEPS} steps: {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        train(int(os.environ["RANK"]))
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        torch.multiprocessing.spawn(train, nprocs=2)
