"""Loading and saving of checkpoint folders. vLLM's plain format is native; nothing is unpickled or executed."""
