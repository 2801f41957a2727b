"""Random generators whose state depends on the seed and on their purpose alone, not on what was drawn
before.
"""

import numpy as np
import torch


def generator(seed: int, *purpose: int) -> torch.Generator:
    """Create a random generator for one purpose.

    Equal arguments give equal draws; any other argument gives unrelated ones.

    Args:
        seed: the seed that the user chose.
        purpose: integers that distinguish this generator from others with the same seed, such as
            the index of a draw.
    """
    # `SeedSequence` hashes the numbers, so that neighboring seeds give unrelated draws.
    state = np.random.SeedSequence([seed, *purpose]).generate_state(2, np.uint32)
    # Two words of 32 bits make a seed of 64 bits.
    return torch.Generator().manual_seed(int(state[0]) << 32 | int(state[1]))
