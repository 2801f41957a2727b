"""The sketch: norms of all class gradients, estimated from random tangents on the weights."""
