"""Levelhead for Hugging Face models: `register()`, then attn_implementation="levelhead".

Importing this imports neither transformers nor torch; calling `register` does.
"""

from ._register import NAME, register, supports

__all__ = ["NAME", "register", "supports"]
