"""From images to scores: sources of batches, a network's transform, the scorer, and sinks."""
