"""A decoding step beside its experts: products of few rows, attention of one query."""
