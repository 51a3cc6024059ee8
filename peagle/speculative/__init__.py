"""Speculative decoding independent of any engine: reference.py (the oracle) and adaptive_k.py (K = "auto")."""
