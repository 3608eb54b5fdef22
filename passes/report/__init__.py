"""What became of a model's MoE layers, and who is told."""
