"""Prints random_split_expected.inc: how PyTorch's own random_split splits.

Needs a Python with torch:  python3 random_split_expected.py > random_split_expected.inc
"""

import torch
from torch.utils.data import random_split

print(f"// Made by random_split_expected.py with PyTorch {torch.__version__}.")
print("// size, lengths, seed; indices of each part")
for size, lengths, seed in ((10, [7, 3], 0), (10, [2, 0, 8], 5), (11, [0.5, 0.3, 0.2], 3), (7, [0.25] * 4, 1)):
    parts = random_split(range(size), lengths, torch.Generator().manual_seed(seed))
    indices = ", ".join("{" + ", ".join(map(str, part.indices)) + "}" for part in parts)
    print(f"{{{size}, {{{', '.join(map(str, lengths))}}}, {seed}u, {{{indices}}}}},")
