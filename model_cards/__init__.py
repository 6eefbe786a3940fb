"""What a saved model says about itself: its card on the Hub, and the facts that `relpos inspect` prints."""

from .card import CardError, write_card
from .inspection import describe_positions, inspect_model

__all__ = ["CardError", "describe_positions", "inspect_model", "write_card"]
