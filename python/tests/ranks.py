"""Runs a function as several ranks, each a process with a process group of its own."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank, function, backend, size, store, results, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        results[rank] = function(*arguments)
    finally:
        dist.destroy_process_group()


def run(function, backend, size, *arguments):
    """What `function(*arguments)` returned on each rank; raises what a rank raised."""
    with tempfile.TemporaryDirectory() as directory, mp.Manager() as manager:
        results = manager.dict()
        store = os.path.join(directory, "store")
        mp.start_processes(_rank, (function, backend, size, store, results, arguments), size,
                           start_method="fork")
        return [results[rank] for rank in range(size)]
