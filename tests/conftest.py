"""Shapes are enforced in the tests: every annotated function of qualms checks what it takes and returns."""

import torch
from hypothesis import settings
from jaxtyping import install_import_hook

install_import_hook("qualms", "beartype.beartype")
torch.set_num_threads(1)  # the tests run in parallel processes
# The same examples every time, however slow the machine is.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.load_profile("fixed")
