"""The paper's networks, and a transformer beside them."""
