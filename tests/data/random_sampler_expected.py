"""Prints random_sampler_expected.inc: what PyTorch's own samplers yield.

Needs a Python with torch:  python3 random_sampler_expected.py > random_sampler_expected.inc
"""

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler


def show(values):
    return "{" + ", ".join(str(value) for value in values) + "}"


def generator(seed, epoch):
    return torch.Generator().manual_seed(seed + epoch)


print(f"// Made by random_sampler_expected.py with PyTorch {torch.__version__}.")
print("// kind, size, replacement, num_samples, weights, seed, epoch; indices")
for seed, epoch in ((0, 0), (7, 3)):
    for size, replacement, count in ((5, False, 5), (5, False, 13), (5, True, 7), (100, True, 70), (3, False, 0)):
        if count == 0:
            continue  # Python refuses it
        sampler = RandomSampler(range(size), replacement, count, generator(seed, epoch))
        print(f"{{'r', {size}, {str(replacement).lower()}, {count}, {{}}, {seed}u, {epoch}, {show(sampler)}}},")
    sampler = SubsetRandomSampler(range(30, 42), generator(seed, epoch))
    print(f"{{'s', 12, false, 12, {{}}, {seed}u, {epoch}, {show(sampler)}}},")
    for weights, count, replacement in (([0.1, 0.9, 0.4, 0.7, 3.0, 0.6], 5, True), ([0.1, 0.9, 0.4, 0.0, 3.0, 0.3], 5, False)):
        sampler = WeightedRandomSampler(weights, count, replacement, generator(seed, epoch))
        print(f"{{'w', {len(weights)}, {str(replacement).lower()}, {count}, {show(weights)}, {seed}u, {epoch}, {show(sampler)}}},")
