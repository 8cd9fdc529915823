"""Generation from a trained model: sampling, batched decoding, chat with kept states, a small OpenAI-style server."""
