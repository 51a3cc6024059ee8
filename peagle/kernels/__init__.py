"""Pure tensor functions, each with a plain torch reference and, where it is faster, a Triton or C version.

Every package has the same shape: `types.py` holds shared dataclasses, `*_torch.py` the reference, `*_triton.py` the
kernels, and the module without a suffix is the entry point that picks one of them.
"""
