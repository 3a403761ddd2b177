"""Installs the compiler for NVIDIA GPUs, which `Predictor` needs, on a machine without one:

  python -m xrl_jax.measure.gpu.install

JAX's plugin for CUDA in the version of this JAX, and CUDA's assembler, are put into a folder where
only xrl_jax looks (`COMPILER_FOLDER`; about 600 MB): JAX would try to use the plugin at every
start, and print why it cannot. With `jax[cuda12]` or `jax[cuda13]` none of this is needed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import jax

from xrl_jax.measure.gpu.compiler import COMPILER_FOLDER

_PACKAGES = (
    f"jax-cuda12-plugin=={jax.__version__}",
    f"jax-cuda12-pjrt=={jax.__version__}",
    "nvidia-cuda-nvcc-cu12",
)


def main() -> int:
    """Install the compiler unless it is there; return pip's exit status."""
    if sys.platform != "linux":
        print("JAX's plugin for CUDA exists for Linux only: nothing is installed", file=sys.stderr)
        return 0
    installed = COMPILER_FOLDER / f"jax_cuda12_plugin-{jax.__version__}.dist-info"
    if installed.is_dir():
        return 0
    shutil.rmtree(COMPILER_FOLDER, ignore_errors=True)  # of another version of JAX
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    target = ["--no-deps", "--target", str(COMPILER_FOLDER)]
    return subprocess.run([*command, *target, *_PACKAGES], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
