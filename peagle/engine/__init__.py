"""The embedded engine: paged cache, continuous batching, speculative rounds, on the CPU or one GPU."""
