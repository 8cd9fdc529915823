"""Facts that follow from a configuration alone: tensors, parameter counts, state and cache bytes, FLOPs. No torch."""
