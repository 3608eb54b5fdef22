"""Which experts a model's tokens were sent to: recorded, kept, replayed, and told of."""
