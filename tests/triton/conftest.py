"""The Triton kernels run here on a CUDA device, or on the CPU with TRITON_INTERPRET=1; otherwise they are skipped."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from moeplan.kernels.triton_interpret import INTERPRETED  # noqa: E402


@pytest.fixture
def device():
    if INTERPRETED:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("no CUDA device, and TRITON_INTERPRET=1 is not set")
