"""Rows in, tables out."""
