from .record import Parity

__all__ = ["Parity"]
