"""Adapters of experts: those of peft on floats, and ours, which codes can have, too."""
