"""KDA over whole sequences in Triton, for Hopper GPUs. Import `support` to ask whether it can run; `autograd` runs it."""
