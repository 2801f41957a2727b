"""The table of rules: which function covers which operation.

A rule takes an `OpCall` and the operation's own arguments, runs the operation, adds a `GradFactor`
for each parameter and returns the result. Where it does not cover the arguments, it returns
`NotImplemented`, and `OpCall.run_on_copies` takes over; where rows cannot be separated,
`NotBatchable` is raised. Any other exception is a bug. To cover a further operation: one function,
one row in `RULES`, one case in the tests' model list.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from qualms.gradients.tracing.rules.broadcast import BROADCASTING, broadcast
from qualms.gradients.tracing.rules.conv import conv, conv_transpose, convolution
from qualms.gradients.tracing.rules.embedding import embedding
from qualms.gradients.tracing.rules.linear import (
    addmm,
    linear,
    matmul,
    unbatched_linear,
    unbatched_matmul,
)
from qualms.gradients.tracing.rules.norm import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    prelu,
    rms_norm,
)
from qualms.gradients.tracing.rules.recurrent import gru_cell, lstm_cell, recurrent, rnn_cell

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {
    # products
    "linear": linear,
    "matmul": matmul,
    "mm": matmul,
    "addmm": addmm,
    # convolutions
    "conv1d": conv,
    "conv2d": conv,
    "conv3d": conv,
    "conv_transpose1d": conv_transpose,
    "conv_transpose2d": conv_transpose,
    "conv_transpose3d": conv_transpose,
    "convolution": convolution,
    # normalizations and scales
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "prelu": prelu,
    # embeddings
    "embedding": embedding,
    # recurrent layers
    "lstm": partial(recurrent, "lstm"),
    "gru": partial(recurrent, "gru"),
    "rnn_tanh": partial(recurrent, "rnn_tanh"),
    "rnn_relu": partial(recurrent, "rnn_relu"),
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "rnn_tanh_cell": partial(rnn_cell, torch.tanh),
    "rnn_relu_cell": partial(rnn_cell, torch.relu),
    # arithmetic: `broadcast` for every name in `BROADCASTING`
}

# For operations whose result has no batch axis, because values of the input decide where an entry
# goes.
UNBATCHED_RULES: dict[str, Rule] = {
    "linear": unbatched_linear,
    "matmul": unbatched_matmul,
    "mm": unbatched_matmul,
}


def find_rule(name: str) -> Rule | None:
    """Look up the rule for an operation; None if there is no rule.

    Args:
        name: name of the operation in torch. `add`, `add_`, `__radd__` and `__iadd__` are spellings
            of the same operation.
    """
    bare_name = name.strip("_")
    if bare_name in RULES:
        return RULES[bare_name]
    spellings = (bare_name, bare_name.removeprefix("r"), bare_name.removeprefix("i"))
    return broadcast if any(spelling in BROADCASTING for spelling in spellings) else None
