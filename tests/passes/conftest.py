"""What plans of passes say does not depend on the processor that runs tests."""

from tests.processor import limits

__all__ = ["limits"]
