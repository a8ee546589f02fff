"""What there is to say about any method: in words, and what leaves a site under it."""
