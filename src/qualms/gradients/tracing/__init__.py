"""Traces a forward pass: where it uses each parameter, and what makes up its gradient.

- `traced_forward.py` runs the forward pass of a model under a `Recorder`.
- `recorder.py`, `op_call.py`: what the recorder does with each operation.
- `rules/`: the gradient of each operation's parameters; `rules/table.py` lists them.
- `factors.py`, `outer_product.py`: what a rule returns.
- `sample_axis.py`, `sample_ids.py`: which entry of a tensor belongs to which sample.
- `param_use.py`: the parameters, and where they are used.
"""
