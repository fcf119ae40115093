"""Text in, packed tokens out.

Import the modules by name: preparing data must not wait for torch to load.
"""
