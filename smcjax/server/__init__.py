"""An OpenAI-compatible HTTP server on `AsyncLLM`, whose replies can hold the whole population. Extra `serve`."""
