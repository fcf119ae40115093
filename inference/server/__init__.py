"""A model behind OpenAI's interface, and a page to talk to it. Needs fastapi and uvicorn."""
