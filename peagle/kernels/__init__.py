"""Pure tensor functions, each with a plain torch reference and, where it is faster, a Triton or C version.

A module without a suffix is the entry point: it has the torch reference and picks the Triton kernels where they run.
Kernels are in the same module, or in `*_triton.py` if they are long; types that both need are in `types.py`. With
TRITON_INTERPRET=1 in the environment, set before the import, the launchers in `*_triton.py` take CPU tensors.
"""
