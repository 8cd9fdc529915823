"""Serving a trained model: engine on a prefix cache, offline generation, chat, an OpenAI-style server."""
