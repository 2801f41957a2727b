"""Models that answer at many positions: the tokens of a text, the pixels of an image."""
