"""A network behind HTTP: images in, predictions, scores and decisions out."""
