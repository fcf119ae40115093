"""Text generation: decoding, sampling, the terminal programs and the server."""
