"""A server with OpenAI's API as a worker's engine: vLLM, SGLang, llama-server or another one.

Imported only by a worker that has such a server, so no other pays for it.
"""
