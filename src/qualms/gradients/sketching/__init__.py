"""Estimates gradient norms by pushing random tangents on the weights through the model.

- `tangents.py`: how tangents are drawn.
- `jvp.py`: Jacobian-vector products, by which a tangent is pushed through the model.
- `projections.py`: norms, estimated from these products.
- `sketch_probe.py`: facts about a model, measured on its first rows, and the checks of the products.
"""
