"""What watches a forward pass: where each parameter meets the input, and what its gradient is made
of.
"""
