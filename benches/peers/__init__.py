"""This engine and its peers, measured side by side.

``pip install ".[worker,peers]"`` installs llama.cpp and transformers.

``llama-server`` is built from the sources in llama-cpp-python::

    pip download --no-binary :all: --no-deps llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B llama -DCMAKE_BUILD_TYPE=Release \\
        -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build llama --target llama-server -j
"""
