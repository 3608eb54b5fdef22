"""The forward of transformers' models, whose like layers run one compiled code."""
