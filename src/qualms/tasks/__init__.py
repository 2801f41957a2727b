"""A network, images and methods in, rows of numbers out."""
