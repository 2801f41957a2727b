"""Rows in, tables out; scores and images in, one HTML page out."""
