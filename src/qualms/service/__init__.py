"""Images in over HTTP, scores and decisions out: one network, one scorer, batches across requests."""
