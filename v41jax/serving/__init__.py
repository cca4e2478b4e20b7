"""An OpenAI-compatible endpoint over the engine. Needs the extra `serve`."""
