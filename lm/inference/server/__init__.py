"""A server with OpenAI's API and a chat page. It needs fastapi and uvicorn."""
