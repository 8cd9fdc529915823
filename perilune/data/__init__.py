"""Text to training batches: corpus, split, token stores, packing, sources, loader, synthetic tasks."""
