"""Folders <-> modules. The plain (vLLM) format is native; nothing is ever unpickled or executed."""
