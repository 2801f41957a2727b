"""Shapes are enforced in the tests: every annotated function of qualms checks what it takes and returns."""

import torch
from jaxtyping import install_import_hook

install_import_hook("qualms", "beartype.beartype")
torch.set_num_threads(1)  # the tests run in parallel processes
