"""Texts in, scores of every token out."""
