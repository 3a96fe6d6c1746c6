#!/usr/bin/env python3
"""Python's DistributedDataParallel, taking turns with `paceline bench ddp`.

    python_ddp.py BACKEND WRAPPER RANKS THREADS MODEL NODE_PROCESSES

WRAPPER is the package whose DistributedDataParallel wraps the model: torch or paceline. Starts the
other ranks itself, in the network namespaces of NODE_PROCESSES, if that is not empty. They meet at
MASTER_ADDR. Reads lines
with a number of steps, makes that many, and answers each with the mean time of a step on the slowest
rank and the CPU time of a step on all ranks, both in microseconds.
"""

import logging
import os
import subprocess
import sys
import time

# Without warnings about machines whose addresses have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def mlp(*widths):
    layers = [nn.Flatten()]
    for i in range(1, len(widths)):
        layers += [nn.ReLU()] * (i > 1) + [nn.Linear(widths[i - 1], widths[i])]
    return nn.Sequential(*layers)


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))


def convolution(in_channels, out_channels, kernel, stride):
    return nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride):
        super().__init__()
        self.body = nn.Sequential(
            convolution(in_channels, out_channels, 3, stride), nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            convolution(out_channels, out_channels, 3, 1), nn.BatchNorm2d(out_channels))
        same = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Sequential() if same else nn.Sequential(
            convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))

    def forward(self, x):
        return self.body(x).add_(self.shortcut(x)).relu_()


def resnet18():
    layers = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
              nn.MaxPool2d(3, 2, 1)]
    width = 64
    for channels, stride in (64, 1), (128, 2), (256, 2), (512, 2):
        layers += [BasicBlock(width, channels, stride), BasicBlock(channels, channels, 1)]
        width = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


# As models/models.cpp has them: samples of a batch, shape of a sample, classes.
MODELS = {
    "tiny_mlp": (16, (64,), 10, lambda: mlp(64, 64, 10)),
    "lenet": (64, (1, 28, 28), 10, lenet),
    "wide_mlp": (32, (2048,), 10, lambda: mlp(2048, 2048, 2048, 2048, 10)),
    "resnet18": (8, (3, 64, 64), 1000, resnet18),
    "resnet18_b64": (64, (3, 64, 64), 1000, resnet18),
}


def measure(step, count):
    step()  # does not count, as in rounds.cpp
    times = torch.zeros(2, dtype=torch.float64)
    for _ in range(count):
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        times += torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    times *= 1e6 / count
    slowest, all_ranks = times[:1].clone(), times[1:].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(all_ranks)
    return slowest.item(), all_ranks.item()


def wrap(wrapper, model):
    if wrapper == "torch":
        return nn.parallel.DistributedDataParallel(model)
    import paceline
    return paceline.DistributedDataParallel(model)


def run(rank, backend, wrapper, ranks, threads, name, store):
    torch.set_num_threads(threads)
    logging.getLogger("paceline").setLevel(logging.ERROR)  # between turns, ranks wait for long
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    samples, shape, classes, make = MODELS[name]
    torch.manual_seed(1)
    model = wrap(wrapper, make())
    inputs, target = torch.randn(samples, *shape), torch.randint(classes, (samples,))
    sgd = torch.optim.SGD(model.parameters(), 1e-3)

    def step():
        sgd.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        sgd.step()

    count = torch.zeros(1, dtype=torch.int64)
    while True:
        if rank == 0:
            line = sys.stdin.readline()
            count[0] = int(line) if line else 0
        dist.broadcast(count, 0)
        if count.item() == 0:
            break
        wall, cpu = measure(step, count.item())
        if rank == 0:
            print(wall, cpu, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def command(rank, ranks, processes):
    python = [sys.executable, *sys.argv]
    if not processes:
        return python
    nodes = processes.split(",")
    return ["nsenter", "-n", "-t", nodes[rank * len(nodes) // ranks], *python]


def main():
    backend, wrapper, name, processes = sys.argv[1], sys.argv[2], sys.argv[5], sys.argv[6]
    ranks, threads = int(sys.argv[3]), int(sys.argv[4])
    address = os.environ["MASTER_ADDR"]
    if len(sys.argv) > 7:
        store = dist.TCPStore(address, int(sys.argv[8]))
        run(int(sys.argv[7]), backend, wrapper, ranks, threads, name, store)
        return
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    others = [subprocess.Popen([*command(rank, ranks, processes), str(rank), str(store.port)],
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
              for rank in range(1, ranks)]
    try:
        run(0, backend, wrapper, ranks, threads, name, store)
    finally:
        for other in others:
            other.wait()


if __name__ == "__main__":
    main()
