"""Random tangents on the weights, pushed through the model: tangents, Jacobian-vector products, norms."""
