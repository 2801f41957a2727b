"""Random generators whose state depends on the seed and on their purpose alone, not on what was drawn
before.
"""

import numpy as np
import torch


def generator(seed: int, *purpose: int) -> torch.Generator:
    """Create a generator for one purpose under a seed.

    Args:
        seed: the seed that the user chose.
        purpose: numbers that tell this generator from others, such as the number of a draw.
    """
    # Hashed: close seeds and purposes then give unrelated numbers.
    state = np.random.SeedSequence([seed, *purpose]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 32 | int(state[1]))
