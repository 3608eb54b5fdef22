"""The ops of a decoding step beside its MoE layers: products of few rows, one-query attention."""
