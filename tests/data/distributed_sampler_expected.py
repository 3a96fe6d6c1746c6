"""Prints distributed_sampler_expected.inc: what PyTorch's own DistributedSampler yields.

Needs a Python with torch:  python3 distributed_sampler_expected.py > distributed_sampler_expected.inc
"""

import struct
import zlib

import torch
from torch.utils.data import DistributedSampler

SMALL = [(10, 3), (11, 4), (12, 4), (2, 5), (3, 7), (1, 1), (7, 1)]
LARGE = [(60000, 2), (60000, 7), (29999, 4), (30001, 4)]


def sample(size, replicas, rank, shuffle, seed, drop_last, epoch):
    sampler = DistributedSampler(range(size), replicas, rank, shuffle, seed, drop_last)
    sampler.set_epoch(epoch)
    indices = list(sampler)
    assert len(indices) == len(sampler)
    return indices


def row(*case):
    size, replicas, rank, shuffle, seed, drop_last, epoch = case
    indices = sample(*case)
    checksum = zlib.crc32(struct.pack(f"<{len(indices)}q", *indices))
    shown = ", ".join(str(index) for index in indices[:16])
    print(
        f"{{{size}, {replicas}, {rank}, {str(shuffle).lower()}, {seed}u, {str(drop_last).lower()}, "
        f"{epoch}, {len(indices)}, 0x{checksum:08x}u, {{{shown}}}}},"
    )


print(f"// Made by distributed_sampler_expected.py with PyTorch {torch.__version__}.")
print("// size, replicas, rank, shuffle, seed, drop_last, epoch; number of indices, CRC-32, the first 16")
for size, replicas in SMALL:
    for rank in range(replicas):
        row(size, replicas, rank, False, 0, False, 0)
        row(size, replicas, rank, False, 0, True, 0)
        row(size, replicas, rank, True, 0, False, 0)
        row(size, replicas, rank, True, 0, False, 3)
        row(size, replicas, rank, True, 2**40 + 7, True, 2)
for size, replicas in LARGE:
    for rank in (0, replicas - 1):
        row(size, replicas, rank, True, 0, False, 0)
        row(size, replicas, rank, True, 42, True, 9)
