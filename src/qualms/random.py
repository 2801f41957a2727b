"""Random generators whose state depends on the seed and their purpose, not on what ran before."""

import numpy as np
import torch


def generator(seed: int, *purpose: int) -> torch.Generator:
    """A generator for one purpose, such as the number of a draw, under one seed."""
    state = np.random.SeedSequence([seed, *purpose]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 32 | int(state[1]))
