"""Estimates gradient norms by pushing random tangents on the weights through the model.

- `tangents.py`: how tangents are drawn.
- `jvp.py`: Jacobian-vector products, by which a tangent is pushed through the model.
- `projections.py`: norms, estimated from the products.
- `sketch_probe.py`: what the first rows show of a model, and the checks of its products.
"""
