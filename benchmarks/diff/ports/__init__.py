"""Models of the sets `seen` and `held-out` as a user ports them, and the conversions of their weights."""
