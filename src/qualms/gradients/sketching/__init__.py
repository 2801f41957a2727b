"""Random weight tangents pushed through the model: tangents, Jacobian-vector products, norms.

- `tangents.py`: how tangents are drawn.
- `jvp.py`: how they are pushed through the model.
- `projections.py`: the norms that the results estimate.
- `sketch_probe.py`: what the first samples show, and the checks of products.
"""
