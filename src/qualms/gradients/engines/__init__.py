"""The exact engine: norms and inner products of all class gradients, from pieces that the recorder
left.
"""
