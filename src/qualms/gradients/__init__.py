"""Model and inputs in, norms per class and layer out."""
