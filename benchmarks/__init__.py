"""Measurements of speed and quality; each prints the table that the docs show."""
