"""Chooses Triton's interpreter before kernels are imported, if there is no CUDA."""

from importlib.util import find_spec

from tests.kernels import interpreter

collect_ignore: list[str] = []
if find_spec("triton") is None:  # not Linux on x86-64
    collect_ignore += [
        "test_attention.py",
        "test_batch_invariance.py",
        "test_compile_for_cards.py",
        "test_quantised_linear.py",
        "test_rope_and_write.py",
        "test_sample.py",
        "test_triton_model.py",
        "test_triton_ops.py",
    ]
else:
    interpreter.prepare()
